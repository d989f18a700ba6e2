// Choose the kernels for this processor.
#include "strips.h"

#include <stdexcept>

#if defined(STRIPS_HALF) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace strips {
namespace {

const Kernels* kernels(Type type) {
  if (type == Type::single) {
#ifdef STRIPS_AVX2
    static const bool modern = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (modern) return &avx2;
#endif
    return &baseline;
  }
#if defined(STRIPS_HALF) && defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDHP ? &half : nullptr;
#elif defined(STRIPS_HALF) && defined(__APPLE__)
  return &half;
#else
  return nullptr;
#endif
}

const Kernels& chosen(Type type, int step) {
  const Kernels* found = kernels(type);
  if (!found) throw std::invalid_argument("this processor does not compute in float16");
  if (step != 4 && step != 6) throw std::invalid_argument("a tile has 4 or 6 outputs");
  return *found;
}

}  // namespace

bool has(Type type) { return kernels(type) != nullptr; }

int products(int step) { return step + 2; }

size_t packed_size(Type type, int step, int filters, int channels) {
  size_t rows = chosen(type, step).rows;
  return products(step) * ((filters + rows - 1) / rows) * rows * channels;
}

void pack(Type type, int step, int filters, int channels, const void* weight, void* packed) {
  chosen(type, step).pack(step, filters, channels, weight, packed);
}

void run(const Strip& strip, int threads, const Parallel& parallel) {
  const Kernels& found = chosen(strip.type, strip.step);
  if (strip.pool && (strip.height % 2 || strip.width % 2)) throw std::invalid_argument("a pool takes maps of even size");
  if (strip.images && strip.filters && strip.height && strip.width) found.run(strip, threads, parallel);
}

void pool_odd(Type type, int maps, int height, int width, bool ceil, const void* x, void* y) {
  chosen(type, 4).pool(maps, height, width, ceil, x, y);
}

}  // namespace strips
