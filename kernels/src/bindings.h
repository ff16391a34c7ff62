// The bind_* functions of every stage, called once by module.cc.
#pragma once

#include <nanobind/nanobind.h>

namespace engram {
void bind_dequant(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_hash(nanobind::module_& m);
void bind_reader(nanobind::module_& m);
void bind_shm(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_unique(nanobind::module_& m);
}  // namespace engram
