// float16 on Arm with half-precision arithmetic (Armv8.2); only this file is compiled for it.
#include <arm_neon.h>

#include <utility>

typedef __fp16 Number;
typedef __fp16 Vector __attribute__((vector_size(16)));
constexpr int rows = 8;

#define STRIPS_NEON
#define UNROLL _Pragma("GCC unroll 8")  // or the sums would live in memory
// By hand: the compiler broadcasts each weight to its own register, and then runs out of registers.
static inline void multiply(const __fp16* w, const __fp16* x, __fp16* out, int stride, int channels) {
  float16x8_t sum[8][3];
  UNROLL for (auto& row : sum) UNROLL for (auto& v : row) v = vdupq_n_f16(0);
  for (int c = 0; c < channels; c++, w += 8, x += 24) {
    float16x8_t a = vld1q_f16(x), b = vld1q_f16(x + 8), d = vld1q_f16(x + 16), v = vld1q_f16(w);
#define ADD(to, x, r) asm("fmla %0.8h, %1.8h, %2.h[" #r "]" : "+w"(to) : "w"(x), "x"(v));
#define ROW(r) ADD(sum[r][0], a, r) ADD(sum[r][1], b, r) ADD(sum[r][2], d, r)
    ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5) ROW(6) ROW(7)
#undef ROW
#undef ADD
  }
  UNROLL for (int r = 0; r < 8; r++) UNROLL for (int j = 0; j < 3; j++) vst1q_f16(out + r * stride + 8 * j, sum[r][j]);
}
// NaN stays NaN in both.
static inline Vector larger(Vector a, Vector b) { return (Vector)vmaxq_f16((float16x8_t)a, (float16x8_t)b); }
static inline Vector rectify(Vector v) { return larger(v, Vector{}); }

#include "kernel.h"

const strips::Kernels strips::half = {rows, strips::pack_here, strips::run_here, strips::pool_here};
