// float32 with the baseline instructions of an architecture: Neon on 64-bit Arm, SSE2 on x86, vectors of four elsewhere.
#include <utility>

typedef float Number;
typedef float Vector __attribute__((vector_size(16)));

#if defined(__aarch64__)
#include <arm_neon.h>
constexpr int rows = 8;
#define STRIPS_NEON
#define UNROLL _Pragma("GCC unroll 8")  // or the sums would live in memory
// 24 sums, 3 vectors of inputs and 2 of weights: 29 of the 32 registers.
static inline void multiply(const float* w, const float* x, float* out, int stride, int channels) {
  float32x4_t sum[8][3];
  UNROLL for (auto& row : sum) UNROLL for (auto& v : row) v = vdupq_n_f32(0);
  for (int c = 0; c < channels; c++, w += 8, x += 12) {
    float32x4_t a = vld1q_f32(x), b = vld1q_f32(x + 4), d = vld1q_f32(x + 8), low = vld1q_f32(w), high = vld1q_f32(w + 4);
#define ROW(r, v, lane)                                \
  sum[r][0] = vfmaq_laneq_f32(sum[r][0], a, v, lane); \
  sum[r][1] = vfmaq_laneq_f32(sum[r][1], b, v, lane); \
  sum[r][2] = vfmaq_laneq_f32(sum[r][2], d, v, lane);
    ROW(0, low, 0) ROW(1, low, 1) ROW(2, low, 2) ROW(3, low, 3) ROW(4, high, 0) ROW(5, high, 1) ROW(6, high, 2) ROW(7, high, 3)
#undef ROW
  }
  UNROLL for (int r = 0; r < 8; r++) UNROLL for (int j = 0; j < 3; j++) vst1q_f32(out + r * stride + 4 * j, sum[r][j]);
}
// NaN stays NaN in both.
static inline Vector larger(Vector a, Vector b) { return (Vector)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
static inline Vector rectify(Vector v) { return larger(v, Vector{}); }
#else
constexpr int rows = 4;  // 12 sums, 3 inputs and a weight: 16 registers
#endif

#include "kernel.h"

const strips::Kernels strips::baseline = {rows, strips::pack_here, strips::run_here, strips::pool_here};
