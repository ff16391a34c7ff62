// NumPy arrays that cross the binding: what is accepted, and how results are handed over.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>

namespace engram {

// A C-contiguous array of exactly this dtype: bind it with nb::arg(...).noconvert(), or nanobind
// would cast another dtype silently.
template <typename T, int Dims>
using InputArray =
    nanobind::ndarray<const T, nanobind::ndim<Dims>, nanobind::c_contig, nanobind::device::cpu>;

template <typename... Args>
auto as_span(const nanobind::ndarray<Args...>& array) {
  return std::span(array.data(), array.size());
}

// Memory of a result, uninitialised, that Python takes over.
template <typename T>
class OutputArray {
 public:
  explicit OutputArray(std::size_t size) : data_(std::make_unique_for_overwrite<T[]>(size)) {}

  T* data() { return data_.get(); }

  nanobind::ndarray<nanobind::numpy, T> release(std::initializer_list<std::size_t> shape) {
    T* data = data_.get();
    nanobind::capsule owner(data, [](void* memory) noexcept { delete[] static_cast<T*>(memory); });
    data_.release();
    return nanobind::ndarray<nanobind::numpy, T>(data, shape, owner);
  }

 private:
  std::unique_ptr<T[]> data_;
};

}  // namespace engram
