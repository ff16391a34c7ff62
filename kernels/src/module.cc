// The Python module engram_kernels._core: one bind_* function per stage.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "Native core of engram-server; see engram_kernels/_core.pyi for the typed interface.";
  engram::bind_hash(m);
  engram::bind_dequant(m);
  engram::bind_reader(m);
  engram::bind_store(m);
  engram::bind_unique(m);
  engram::bind_engine(m);
  engram::bind_shm(m);
}
