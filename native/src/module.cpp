// The Python module: arrays are checked here, so that the kernels can trust their pointers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "parallel.h"
#include "strips.h"

namespace nb = nanobind;
using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
using Input = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;

namespace {

strips::Type type_of(nb::dlpack::dtype dtype) {
  if (dtype == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 32, 1}) return strips::Type::single;
  if (dtype == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 16, 1}) return strips::Type::half;
  throw std::invalid_argument("strips compute in float32 and float16");
}

void check(bool right, const char* what) {
  if (!right) throw std::invalid_argument(what);
}

int checked_int(size_t size) {
  check(size < (size_t(1) << 31), "an array is too large");
  return int(size);
}

size_t packed_size(const std::string& type, int filters, int channels, int step) {
  check(filters > 0 && channels > 0, "a weight has filters and channels");
  check(type == "float32" || type == "float16", "strips compute in float32 and float16");
  return strips::packed_size(type == "float32" ? strips::Type::single : strips::Type::half, step, filters, channels);
}

void pack(Input weight, Array packed, int step) {
  check(weight.ndim() == 3 && weight.shape(2) == 3, "a weight has the shape [filters, channels, 3]");
  check(weight.dtype() == packed.dtype(), "weight and packed differ in type");
  int filters = checked_int(weight.shape(0)), channels = checked_int(weight.shape(1));
  strips::Type type = type_of(weight.dtype());
  check(packed.size() == strips::packed_size(type, step, filters, channels), "packed has another size");
  nb::gil_scoped_release free;
  strips::pack(type, step, filters, channels, weight.data(), packed.data());
}

void run(Input x, Input packed, Input bias, Array y, int first, bool across, int step, bool relu, bool pool,
         int threads) {
  check(x.ndim() == 4 && y.ndim() == 4, "maps have the shape [images, channels, height, width]");
  size_t by = pool ? 2 : 1;
  check(x.shape(0) == y.shape(0) && x.shape(2) == y.shape(2) * by && x.shape(3) == y.shape(3) * by, "x and y differ in size");
  check(x.dtype() == packed.dtype() && x.dtype() == bias.dtype() && x.dtype() == y.dtype(), "arrays differ in type");
  check(bias.ndim() == 1, "the bias has one number per filter");
  check(first >= 0 && first + bias.size() <= y.shape(1), "y has too few channels");
  strips::Strip strip;
  strip.type = type_of(x.dtype());
  strip.axis = across ? strips::Axis::across : strips::Axis::down;
  strip.step = step;
  strip.images = checked_int(x.shape(0)), strip.channels = checked_int(x.shape(1));
  strip.height = checked_int(x.shape(2)), strip.width = checked_int(x.shape(3));
  strip.filters = checked_int(bias.size());
  check(packed.size() == strips::packed_size(strip.type, step, strip.filters, strip.channels), "packed has another size");
  size_t area = y.shape(2) * y.shape(3), bytes = x.itemsize();
  strip.x = x.data(), strip.packed = packed.data(), strip.bias = bias.data();
  strip.y = static_cast<char*>(y.data()) + first * area * bytes;
  strip.y_image = ptrdiff_t(y.shape(1) * area);
  strip.relu = relu, strip.pool = pool;
  nb::gil_scoped_release free;
  strips::run(strip, threads, [=](int items, const std::function<void(int)>& body) { strips::on_threads(threads, items, body); });
}

}  // namespace

NB_MODULE(_strips, m) {
  m.def("has_half", [] { return strips::has(strips::Type::half); }, "Whether this processor computes in float16.");
  m.def("use_openmp", &strips::use_openmp, nb::arg("library"), "Take the threads of an OpenMP runtime that is loaded.");
  m.def("packed_size", &packed_size, nb::arg("type"), nb::arg("filters"), nb::arg("channels"), nb::arg("step"),
        "Numbers in the packed weights.");
  m.def("pack", &pack, nb::arg("weight"), nb::arg("packed"), nb::arg("step"), "Write transformed weights into `packed`.");
  m.def("run", &run, nb::arg("x"), nb::arg("packed"), nb::arg("bias"), nb::arg("y"), nb::arg("first"), nb::arg("across"),
        nb::arg("step"), nb::arg("relu"), nb::arg("pool"),
        nb::arg("threads"), "Write the results of a group of filters into y[:, first:].");
}
