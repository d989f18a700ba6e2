// float32 on x86 with AVX2 and FMA; only this file is compiled for them.
#include <utility>

typedef float Number;
typedef float Vector __attribute__((vector_size(32)));
constexpr int rows = 4;  // 12 sums, 3 inputs and a weight: 16 registers

#include "kernel.h"

const strips::Kernels strips::avx2 = {rows, strips::pack_here, strips::run_here, strips::pool_here};
