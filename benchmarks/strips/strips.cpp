// One layer of vgg11-gmp-lr as compiled strips: how fast can a 1x3 or 3x1 conv be on an Arm CPU?
//
// The layer (conv3_2): 256 channels in, 128 filters of 1x3 and 128 of 3x1, maps of 56x56, batch 1. Three ways:
//   direct    three products per output, fp32 and fp16: the roofline of plain multiply-accumulates.
//   F(4,3)    Winograd's minimal filtering along the strip: six products give four outputs, fp32 and fp16.
//   F(6,3)    eight products give six outputs.
//   int8 dot  sdot, four products per lane: three taps, signed weights and activations.
//
// Layout. Channels come in blocks of L (4 for fp32, 8 for fp16, 4 products for int8), pixels of a row lie side by
// side: the transformed input is [frequency][panel][channel][12 or 24 tiles], the weights [frequency][filter
// block][channel][8]. The product for one frequency is a matrix product of filters x channels by channels x tiles,
// run by the register-blocked kernel below (8 filters x 12 or 24 tiles), which is what the engines use too.
// A 3x1 strip is a 1x3 strip of the transposed map, so only one direction is timed and counted twice; that favours
// our own side, since the transposition is left out.
//
// Build: g++ -O3 -march=native -fopenmp strips.cpp -o strips      Run: OMP_NUM_THREADS=2 ./strips
#include <arm_neon.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int C = 256, K = 128, H = 56, W = 56;

template <class T> struct Buffer {
  T* p;
  explicit Buffer(size_t n) { p = static_cast<T*>(aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64)); std::fill(p, p + n, T(0)); }
  ~Buffer() { free(p); }
};

static double median(std::vector<double> t) { std::sort(t.begin(), t.end()); return t[t.size() / 2]; }

template <class F> double timed(F run) {
  std::vector<double> t;
  for (int i = 0; i < 25; i++) {
    auto a = std::chrono::steady_clock::now();
    run();
    t.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - a).count());
  }
  return median(t);
}

// out[8][n] += w[c][8]^T x[c][n], n = 12 floats: 24 accumulators of 4.
static inline void block32(const float* w, const float* x, int stride, float* out, int out_stride, int channels) {
  float32x4_t a[8][3];
  for (auto& row : a) for (auto& v : row) v = vdupq_n_f32(0);
  for (int c = 0; c < channels; c++, w += 8, x += stride) {
    float32x4_t x0 = vld1q_f32(x), x1 = vld1q_f32(x + 4), x2 = vld1q_f32(x + 8), w0 = vld1q_f32(w), w1 = vld1q_f32(w + 4);
#define ROW(k, v, l) a[k][0] = vfmaq_laneq_f32(a[k][0], x0, v, l); a[k][1] = vfmaq_laneq_f32(a[k][1], x1, v, l); a[k][2] = vfmaq_laneq_f32(a[k][2], x2, v, l);
    ROW(0, w0, 0) ROW(1, w0, 1) ROW(2, w0, 2) ROW(3, w0, 3) ROW(4, w1, 0) ROW(5, w1, 1) ROW(6, w1, 2) ROW(7, w1, 3)
#undef ROW
  }
  for (int k = 0; k < 8; k++) for (int j = 0; j < 3; j++) vst1q_f32(out + k * out_stride + 4 * j, a[k][j]);
}

// The same in half precision: 24 columns.
static inline void block16(const float16_t* w, const float16_t* x, int stride, float16_t* out, int out_stride, int channels) {
  float16x8_t a[8][3];
  for (auto& row : a) for (auto& v : row) v = vdupq_n_f16(0);
  for (int c = 0; c < channels; c++, w += 8, x += stride) {
    float16x8_t x0 = vld1q_f16(x), x1 = vld1q_f16(x + 8), x2 = vld1q_f16(x + 16), w0 = vld1q_f16(w);
#define ROW(k) a[k][0] = vfmaq_laneq_f16(a[k][0], x0, w0, k); a[k][1] = vfmaq_laneq_f16(a[k][1], x1, w0, k); a[k][2] = vfmaq_laneq_f16(a[k][2], x2, w0, k);
    ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5) ROW(6) ROW(7)
#undef ROW
  }
  for (int k = 0; k < 8; k++) for (int j = 0; j < 3; j++) vst1q_f16(out + k * out_stride + 8 * j, a[k][j]);
}

// int8: x[c/4][column][4], w[c/4][8][4]: 8 filters x 12 columns by sdot.
static inline void block8(const int8_t* w, const int8_t* x, int stride, int32_t* out, int out_stride, int quads) {
  int32x4_t a[8][3];
  for (auto& row : a) for (auto& v : row) v = vdupq_n_s32(0);
  for (int c = 0; c < quads; c++, w += 32, x += stride) {
    int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16), x2 = vld1q_s8(x + 32), w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
#define ROW(k, v, l) a[k][0] = vdotq_laneq_s32(a[k][0], x0, v, l); a[k][1] = vdotq_laneq_s32(a[k][1], x1, v, l); a[k][2] = vdotq_laneq_s32(a[k][2], x2, v, l);
    ROW(0, w0, 0) ROW(1, w0, 1) ROW(2, w0, 2) ROW(3, w0, 3) ROW(4, w1, 0) ROW(5, w1, 1) ROW(6, w1, 2) ROW(7, w1, 3)
#undef ROW
  }
  for (int k = 0; k < 8; k++) for (int j = 0; j < 3; j++) vst1q_s32(out + k * out_stride + 4 * j, a[k][j]);
}

static inline void block(const float* w, const float* x, int s, float* o, int os, int c) { block32(w, x, s, o, os, c); }
static inline void block(const float16_t* w, const float16_t* x, int s, float16_t* o, int os, int c) { block16(w, x, s, o, os, c); }

// The type of one element of a vector, or of a number itself.
typedef float vec32 __attribute__((vector_size(16)));
typedef __fp16 vec16 __attribute__((vector_size(16)));
template <class T> struct Element { typedef T type; };
template <> struct Element<vec32> { typedef float type; };
template <> struct Element<vec16> { typedef __fp16 type; };

// Transforms of one tile. B^T d and A^T m of F(4,3) [Lavin and Gray 2016] and F(6,3).
template <class T, int M> struct Winograd;
template <class T> struct Winograd<T, 4> {
  static constexpr int N = 6;
  static void input(const T* d, T* v) {
    v[0] = 4 * d[0] - 5 * d[2] + d[4];
    T a = d[4] - 4 * d[2], b = d[3] - 4 * d[1];
    v[1] = a + b; v[2] = a - b;
    a = d[4] - d[2]; b = 2 * (d[3] - d[1]);
    v[3] = a + b; v[4] = a - b;
    v[5] = 4 * d[1] - 5 * d[3] + d[5];
  }
  static void output(const T* m, T* y) {
    T p = m[1] + m[2], q = m[1] - m[2], r = m[3] + m[4], s = m[3] - m[4];
    y[0] = m[0] + p + r; y[1] = q + 2 * s; y[2] = p + 4 * r; y[3] = q + 8 * s + m[5];
  }
  static constexpr double G[6][3] = {{.25, 0, 0}, {-1 / 6., -1 / 6., -1 / 6.}, {-1 / 6., 1 / 6., -1 / 6.}, {1 / 24., 1 / 12., 1 / 6.}, {1 / 24., -1 / 12., 1 / 6.}, {0, 0, 1}};
};
template <class T> constexpr double Winograd<T, 4>::G[6][3];
template <class T> struct Winograd<T, 6> {
  static constexpr int N = 8;
  typedef typename Element<T>::type S;
  static void input(const T* d, T* v) {
    v[0] = d[0] - d[6] + S(5.25) * (d[4] - d[2]);
    T a = d[2] + d[6] - S(4.25) * d[4], b = d[1] + d[5] - S(4.25) * d[3];
    v[1] = a + b; v[2] = a - b;
    a = d[6] + S(.25) * d[2] - S(1.25) * d[4]; b = S(.5) * d[1] - S(2.5) * d[3] + 2 * d[5];
    v[3] = a + b; v[4] = a - b;
    a = d[6] + 4 * (d[2] - S(1.25) * d[4]); b = 2 * d[1] - S(2.5) * d[3] + S(.5) * d[5];
    v[5] = a + b; v[6] = a - b;
    v[7] = d[7] - d[1] + S(5.25) * (d[3] - d[5]);
  }
  static void output(const T* m, T* y) {
    T p = m[1] + m[2], q = m[1] - m[2], r = m[3] + m[4], s = m[3] - m[4], t = m[5] + m[6], u = m[5] - m[6];
    y[0] = m[0] + p + r + 32 * t; y[1] = q + 2 * s + 16 * u; y[2] = p + 4 * r + 8 * t;
    y[3] = q + 8 * s + 4 * u; y[4] = p + 16 * r + 2 * t; y[5] = m[7] + q + 32 * s + u;
  }
  static constexpr double G[8][3] = {{1, 0, 0}, {-2 / 9., -2 / 9., -2 / 9.}, {-2 / 9., 2 / 9., -2 / 9.}, {1 / 90., 1 / 45., 2 / 45.}, {1 / 90., -1 / 45., 2 / 45.}, {1 / 45., 1 / 90., 1 / 180.}, {1 / 45., -1 / 90., 1 / 180.}, {0, 0, 1}};
};
template <class T> constexpr double Winograd<T, 6>::G[8][3];

// A lane-parallel vector of the type, so that one transform handles several rows at a time.
template <class T> struct Lane;
template <> struct Lane<float> { typedef vec32 type; static constexpr int n = 4; static constexpr int columns = 12; };
template <> struct Lane<float16_t> { typedef vec16 type; static constexpr int n = 8; static constexpr int columns = 24; };

// Where a column of a channel lies in panels of P columns.
template <int P> size_t panel(int channels, int channel, int column) { return (size_t(column / P) * channels + channel) * P + column % P; }

// The map is [C][W + 2 (+ tail)][H]: rows of the image lie side by side, so that a vector holds H-neighbours and
// tiles run along W. A strip's transform then needs no shuffles. Columns of the product: (tile, row) pairs.
template <class T, int M> double winograd(const std::vector<float>& image, const std::vector<float>& weights, double* error) {
  typedef Winograd<typename Lane<T>::type, M> V;
  constexpr int N = V::N, tiles = (W + M - 1) / M, L = Lane<T>::n, P = Lane<T>::columns;
  constexpr int padded = tiles * M + 2, columns = tiles * H, width = (columns + P - 1) / P * P;
  Buffer<T> x(size_t(C) * padded * H), u(size_t(N) * C * K), v(size_t(N) * C * width), m(size_t(N) * K * width), y(size_t(K) * tiles * M * H);
  for (int c = 0; c < C; c++) for (int j = 0; j < W; j++) for (int i = 0; i < H; i++) x.p[(size_t(c) * padded + j + 1) * H + i] = T(image[(c * H + i) * W + j]);
  for (int k = 0; k < K; k++) for (int c = 0; c < C; c++) for (int f = 0; f < N; f++) {
    double s = 0;
    for (int t = 0; t < 3; t++) s += Winograd<T, M>::G[f][t] * weights[(k * C + c) * 3 + t];
    u.p[((size_t(f) * K / 8 + k / 8) * C + c) * 8 + k % 8] = T(s);
  }
  typedef typename Lane<T>::type vec;
  double ms = timed([&] {
#pragma omp parallel
    {
#pragma omp for
      for (int c = 0; c < C; c++) for (int t = 0; t < tiles; t++) for (int i = 0; i < H; i += L) {
        vec d[N], r[N];
        for (int f = 0; f < N; f++) d[f] = *reinterpret_cast<const vec*>(x.p + (size_t(c) * padded + t * M + f) * H + i);
        V::input(d, r);
        for (int f = 0; f < N; f++) *reinterpret_cast<vec*>(v.p + size_t(f) * C * width + panel<P>(C, c, t * H + i)) = r[f];
      }
#pragma omp for collapse(2) schedule(static)
      for (int f = 0; f < N; f++) for (int p = 0; p < width; p += P) for (int k = 0; k < K; k += 8)
        block(u.p + (size_t(f) * K / 8 + k / 8) * C * 8, v.p + size_t(f) * C * width + size_t(p) * C, P, m.p + (size_t(f) * K + k) * width + p, width, C);
#pragma omp for
      for (int k = 0; k < K; k++) for (int t = 0; t < tiles; t++) for (int i = 0; i < H; i += L) {
        vec d[N], r[M];
        for (int f = 0; f < N; f++) d[f] = *reinterpret_cast<const vec*>(m.p + (size_t(f) * K + k) * width + t * H + i);
        V::output(d, r);
        for (int f = 0; f < M; f++) *reinterpret_cast<vec*>(y.p + (size_t(k) * tiles * M + t * M + f) * H + i) = r[f];
      }
    }
  });
  double worst = 0, most = 0;
  for (int k = 0; k < K; k += 37) for (int i = 0; i < H; i += 5) for (int j = 0; j < W; j += 3) {
    double s = 0;
    for (int c = 0; c < C; c++) for (int t = 0; t < 3; t++) { int q = j + t - 1; if (q >= 0 && q < W) s += double(weights[(k * C + c) * 3 + t]) * image[(c * H + i) * W + q]; }
    worst = std::max(worst, std::fabs(s - double(y.p[(size_t(k) * tiles * M + j) * H + i])));
    most = std::max(most, std::fabs(s));
  }
  *error = worst / most;
  return ms;
}

// Three products per output on the same layout, in the same kernel: channels and taps are one long sum.
template <class T> double direct(const std::vector<float>& image, const std::vector<float>& weights, double* error) {
  constexpr int P = Lane<T>::columns, padded = W + 2, columns = W * H, width = (columns + P - 1) / P * P;
  Buffer<T> x(size_t(C) * padded * H + P), u(size_t(3) * C * K), y(size_t(K) * width), part(size_t(K) * width);
  for (int c = 0; c < C; c++) for (int j = 0; j < W; j++) for (int i = 0; i < H; i++) x.p[(size_t(c) * padded + j + 1) * H + i] = T(image[(c * H + i) * W + j]);
  // A tap is an offset of one column of H values, so that taps are further "channels" of an interleaved copy.
  Buffer<T> taps(size_t(3) * C * width);
  for (int k = 0; k < K; k++) for (int c = 0; c < C; c++) for (int t = 0; t < 3; t++) u.p[(size_t(k / 8) * 3 * C + t * C + c) * 8 + k % 8] = T(weights[(k * C + c) * 3 + t]);
  typedef typename Lane<T>::type vec;
  double ms = timed([&] {
#pragma omp parallel
    {
#pragma omp for
      for (int c = 0; c < C; c++) for (int t = 0; t < 3; t++) for (int q = 0; q < columns; q += Lane<T>::n)
        *reinterpret_cast<vec*>(taps.p + panel<P>(3 * C, t * C + c, q)) = *reinterpret_cast<const vec*>(x.p + (size_t(c) * padded + t) * H + q);
#pragma omp for schedule(static)
      for (int p = 0; p < width; p += P) for (int k = 0; k < K; k += 8)
        block(u.p + size_t(k / 8) * 3 * C * 8, taps.p + size_t(p) * 3 * C, P, y.p + size_t(k) * width + p, width, 3 * C);
    }
  });
  double worst = 0, most = 0;
  for (int k = 0; k < K; k += 37) for (int i = 0; i < H; i += 5) for (int j = 0; j < W; j += 3) {
    double s = 0;
    for (int c = 0; c < C; c++) for (int t = 0; t < 3; t++) { int q = j + t - 1; if (q >= 0 && q < W) s += double(weights[(k * C + c) * 3 + t]) * image[(c * H + i) * W + q]; }
    worst = std::max(worst, std::fabs(s - double(y.p[size_t(k) * width + j * H + i])));
    most = std::max(most, std::fabs(s));
  }
  *error = worst / most;
  return ms;
}

// int8: [tap][quad of channels][pixel][4]; the result is scaled and stored as int8, as a network would.
double dot8(double* error) {
  constexpr int P = 12, padded = W + 2, columns = W * H, width = (columns + P - 1) / P * P, Q = C / 4;
  Buffer<int8_t> x(size_t(Q) * padded * H * 4 + 64), u(size_t(3) * C * K), y(size_t(K) * width);
  for (size_t i = 0; i < size_t(Q) * padded * H * 4; i++) { size_t column = i / 4 / H % padded; x.p[i] = column == 0 || column == padded - 1 ? 0 : int8_t(i * 7 % 13) - 6; }
  for (size_t i = 0; i < size_t(3) * C * K; i++) u.p[i] = int8_t(i * 5 % 11) - 5;
  double ms = timed([&] {
#pragma omp parallel for schedule(static)
    for (int p = 0; p < width; p += P) for (int k = 0; k < K; k += 8) {
      int32_t sum[8 * P] = {}, one[8 * P];
      for (int t = 0; t < 3; t++) {
        block8(u.p + (size_t(t) * K / 8 + k / 8) * C * 8, x.p + (size_t(t) * H + p) * 4, padded * H * 4, one, P, Q);
        for (int i = 0; i < 8 * P; i++) sum[i] += one[i];
      }
      for (int i = 0; i < 8; i++) for (int j = 0; j < P; j++) y.p[size_t(k + i) * width + p + j] = int8_t(std::clamp(int(lrintf(float(sum[i * P + j]) * 0.01f)), -128, 127));
    }
  });
  int wrong = 0;
  for (int k = 0; k < K; k += 5) for (int p = 0; p < columns; p += 7) {
    int s = 0;
    for (int t = 0; t < 3; t++) for (int q = 0; q < Q; q++) for (int e = 0; e < 4; e++) s += u.p[((size_t(t) * K / 8 + k / 8) * Q + q) * 32 + k % 8 * 4 + e] * x.p[((size_t(q) * padded + t) * H + p) * 4 + e];
    wrong += y.p[size_t(k) * width + p] != int8_t(std::clamp(int(lrintf(float(s) * 0.01f)), -128, 127));
  }
  *error = wrong;
  return ms;
}

int main() {
  std::vector<float> image(size_t(C) * H * W), weights(size_t(K) * C * 3);
  srand(1);
  for (auto& v : image) v = float(rand()) / RAND_MAX - .5f;
  for (auto& v : weights) v = (float(rand()) / RAND_MAX - .5f) / 16;
  double macs = 2. * K * C * 3 * H * W, error;
  printf("{\"layer\": \"256 -> 128 1x3 + 128 3x1, 56x56\", \"macs\": %.0f, \"ways\": {", macs);
  auto show = [&](const char* name, double ms, bool last = false) { printf("\"%s\": {\"ms\": %.3f, \"gmacs\": %.1f, \"error\": %.2g}%s", name, 2 * ms, macs / 2 / ms / 1e6, error, last ? "" : ", "); };
  show("direct fp32", direct<float>(image, weights, &error));
  show("F(4,3) fp32", winograd<float, 4>(image, weights, &error));
  show("F(6,3) fp32", winograd<float, 6>(image, weights, &error));
  show("direct fp16", direct<float16_t>(image, weights, &error));
  show("F(4,3) fp16", winograd<float16_t, 4>(image, weights, &error));
  show("F(6,3) fp16", winograd<float16_t, 6>(image, weights, &error));
  show("dot int8", dot8(&error), true);
  printf("}}\n");
}
