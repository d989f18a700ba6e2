// Convolutions with strips, filters of 1x3 and 3x1, at stride one: the interface of the kernels.
#pragma once

#include <cstddef>
#include <functional>

namespace strips {

enum class Axis { down = 0, across = 1 };  // 3x1 filters look down, 1x3 filters look across
enum class Type { single, half };

// One group of filters over a batch of maps in NCHW. The output is as large as the input, and the borders are zeros;
// with `pool`, for maps of even height and width, the largest of each 2x2 results is kept.
struct Strip {
  Type type;
  Axis axis;
  int step;  // outputs per tile: 4 by F(4, 3), 6 by F(6, 3)
  int images, channels, height, width, filters;
  const void* x;       // [images, channels, height, width]
  const void* packed;  // the result of `pack`
  const void* bias;    // [filters], or null
  void* y;             // [filters, height, width] of the first image, or half of both
  ptrdiff_t y_image;   // elements from one image of y to the next
  bool relu, pool;
};

// Calls body(item) for every item from 0 on, on any number of threads.
using Parallel = std::function<void(int items, const std::function<void(int)>& body)>;

bool has(Type type);  // whether this processor computes in the type
int products(int step);
size_t packed_size(Type type, int step, int filters, int channels);  // elements
void pack(Type type, int step, int filters, int channels, const void* weight, void* packed);  // [filters, channels, 3]
void run(const Strip& strip, int threads, const Parallel& parallel);
void pool_odd(Type type, int maps, int height, int width, bool ceil, const void* x, void* y);  // 2x2, for maps of any size

// The same for one set of instructions: `kernel.h` defines them, and one file for each set includes it.
struct Kernels {
  int rows;  // filters in a block of packed weights
  void (*pack)(int step, int filters, int channels, const void* weight, void* packed);
  void (*run)(const Strip& strip, int threads, const Parallel& parallel);
  void (*pool)(int maps, int height, int width, bool ceil, const void* x, void* y);
};

extern const Kernels baseline;  // float32: Neon on Arm, SSE2 on x86, plain C++ elsewhere
#ifdef STRIPS_AVX2
extern const Kernels avx2;  // float32
#endif
#ifdef STRIPS_HALF
extern const Kernels half;  // float16 by Neon
#endif

}  // namespace strips
