// The kernel for one set of instructions. The including file defines `Number`, `Vector` (of `lanes` numbers), `rows`
// and, where it has a better one, `multiply`.
//
// A tile is `step` outputs along the strip, made of `products` = step + 2 inputs. Across the strip, `lanes` neighbours
// lie in one vector: columns of a map for 3x1 filters, rows of it for 1x3 filters, which are transposed on the way in
// and out. One (tile, lanes) pair is a vector of the problem; there are as many products per vector as matrices.
//
//   1. A chunk of vectors is transformed for all channels: [product][panel][channel][3 vectors]. It fits into the L2
//      cache.
//   2. For each block of `rows` filters, each product is a matrix product [rows, channels] x [channels, 3 vectors], kept
//      in registers.
//   3. The products of a block lie in the L1 cache. They are transformed back, biased, rectified and stored.
//
// Work is divided by chunks and, where these are few, by filters: transforming the input twice costs less than waiting.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "strips.h"
#include "winograd.h"

namespace strips {
namespace {

constexpr int lanes = sizeof(Vector) / sizeof(Number);
constexpr int panel = 3;                   // vectors in the registers of the matrix product
constexpr size_t cache = 384 * 1024;       // bytes of a chunk: a part of the L2 cache
constexpr int most_vectors = 24;           // in a chunk, so that the products of a block fit into L1

inline int parts(int whole, int part) { return (whole + part - 1) / part; }

inline Vector load(const Number* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(Number* p, Vector v) { std::memcpy(p, &v, sizeof v); }

inline Vector load_part(const Number* p, int count) {
  Vector v = {};
  std::memcpy(&v, p, sizeof(Number) * count);
  return v;
}

inline Vector load_at_most(const Number* p, int count) { return count >= lanes ? load(p) : load_part(p, count); }

inline Vector spread(Number n) {
  Vector v;
  for (int l = 0; l < lanes; l++) v[l] = n;
  return v;
}

template <int... i>
inline Vector zipped_low(Vector a, Vector b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i / 2 + i % 2 * lanes)...);
}
template <int... i>
inline Vector zipped_high(Vector a, Vector b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (lanes / 2 + i / 2 + i % 2 * lanes)...);
}

// A square of numbers, one vector per row: log2(lanes) perfect shuffles transpose it.
inline void transpose(Vector* v) {
  for (int width = 1; width < lanes; width *= 2) {
    Vector w[lanes];
    for (int i = 0; i < lanes / 2; i++) {
      w[2 * i] = zipped_low(v[i], v[i + lanes / 2], std::make_integer_sequence<int, lanes>());
      w[2 * i + 1] = zipped_high(v[i], v[i + lanes / 2], std::make_integer_sequence<int, lanes>());
    }
    for (int i = 0; i < lanes; i++) v[i] = w[i];
  }
}

#ifndef STRIPS_NEON
inline Vector rectify(Vector v) { return v < Vector{} ? Vector{} : v; }  // NaN stays

// out[rows][3 vectors] = w[channels][rows]^T x[channels][3 vectors]; rows of out are `stride` numbers apart.
inline void multiply(const Number* w, const Number* x, Number* out, int stride, int channels) {
  Vector sum[rows][panel] = {};
  for (int c = 0; c < channels; c++, w += rows, x += panel * lanes) {
    Vector a = load(x), b = load(x + lanes), d = load(x + 2 * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      sum[r][0] += a * w[r];
      sum[r][1] += b * w[r];
      sum[r][2] += d * w[r];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int j = 0; j < panel; j++) store(out + r * stride + j * lanes, sum[r][j]);
}
#endif

// Memory of a thread that stays for the next call.
inline Number* scratch(size_t numbers) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local size_t size = 0;
  size_t bytes = (numbers * sizeof(Number) + 63) / 64 * 64;
  if (bytes > size) {
    memory.reset(std::aligned_alloc(64, bytes));
    if (!memory) throw std::bad_alloc();
    size = bytes;
  }
  return static_cast<Number*>(memory.get());
}

template <int step>
struct Runner {
  using Transform = Winograd<Vector, Number, step>;
  static constexpr int products = Transform::products;

  const Strip& s;
  int tiles, groups, vectors, in_chunk, chunks, blocks, splits;

  Runner(const Strip& strip, int threads) : s(strip) {
    int along = s.axis == Axis::down ? s.height : s.width, beside = s.axis == Axis::down ? s.width : s.height;
    tiles = parts(along, step);
    groups = parts(beside, lanes);
    vectors = tiles * groups;
    int fit = int(cache / (sizeof(Vector) * products * s.channels)) / panel * panel;
    in_chunk = std::min(std::clamp(fit, panel, most_vectors), parts(vectors, panel) * panel);
    chunks = parts(vectors, in_chunk);
    in_chunk = parts(parts(vectors, chunks), panel) * panel;  // of equal size
    chunks = parts(vectors, in_chunk);
    blocks = parts(s.filters, rows);
    int whole = s.images * chunks;
    splits = 1;
    while (splits < std::min(blocks, threads) && whole * splits % threads && whole * splits < 8 * threads) splits++;
  }

  int items() const { return s.images * chunks * splits; }

  const Number* x(int image, int channel) const {
    return static_cast<const Number*>(s.x) + (size_t(image) * s.channels + channel) * s.height * s.width;
  }
  Number* y(int image, int filter) const {
    return static_cast<Number*>(s.y) + image * s.y_image + size_t(filter) * s.height * s.width;
  }

  void item(int index) const {
    int split = index % splits, chunk = index / splits % chunks, image = index / splits / chunks;
    int first = chunk * in_chunk, count = std::min(in_chunk, vectors - first), panels = parts(count, panel);
    int width = in_chunk * lanes;
    size_t inputs = size_t(products) * s.channels * width, results = size_t(products) * rows * width;
    size_t line = s.axis == Axis::across ? size_t(tiles * step + 2 + lanes) * lanes : 0;
    Number* v = scratch(inputs + results + line);
    Number *m = v + inputs, *stage = m + results;
    for (int c = 0; c < s.channels; c++)
      s.axis == Axis::down ? rows_in(image, c, first, count, v) : columns_in(image, c, first, count, v, stage);
    int from = blocks * split / splits, to = blocks * (split + 1) / splits;
    const Number* packed = static_cast<const Number*>(s.packed);
    for (int block = from; block < to; block++) {
      for (int f = 0; f < products; f++)
        for (int p = 0; p < panels; p++)
          multiply(packed + (size_t(f) * blocks + block) * s.channels * rows, place(v, f, p * panel, 0),
                   m + size_t(f) * rows * width + p * panel * lanes, width, s.channels);
      int filters = std::min(rows, s.filters - block * rows);
      for (int r = 0; r < filters; r++) {
        int filter = block * rows + r;
        s.axis == Axis::down ? rows_out(image, filter, first, count, m + r * width)
                             : columns_out(image, filter, first, count, m + r * width, stage);
      }
    }
  }

  // Where product f of a vector and channel lies in a chunk's inputs.
  Number* place(Number* v, int f, int vector, int channel) const {
    size_t which = size_t(f) * (in_chunk / panel) + vector / panel;
    return v + ((which * s.channels + channel) * panel + vector % panel) * lanes;
  }

  void transform_in(const Vector* d, Number* v, int vector, int channel) const {
    Vector made[products];
    Transform::input(d, made);
    for (int f = 0; f < products; f++) store(place(v, f, vector, channel), made[f]);
  }

  // Product f of a filter lies `rows` lines of a chunk behind product f - 1.
  void transform_out(const Number* m, int vector, int filter, Vector* made) const {
    Vector d[products];
    for (int f = 0; f < products; f++) d[f] = load(m + (size_t(f) * rows * in_chunk + vector) * lanes);
    Transform::output(d, made);
    Vector shift = spread(s.bias ? static_cast<const Number*>(s.bias)[filter] : Number(0));
    for (int i = 0; i < step; i++) {
      made[i] += shift;
      if (s.relu) made[i] = rectify(made[i]);
    }
  }

  // 3x1 filters: vectors are parts of rows, and tiles run down.
  void rows_in(int image, int channel, int first, int count, Number* v) const {
    const Number* map = x(image, channel);
    for (int i = 0; i < count; i++) {
      int top = (first + i) / groups * step - 1, left = (first + i) % groups * lanes;
      Vector d[products];
      for (int f = 0; f < products; f++) {
        int row = top + f;
        bool inside = row >= 0 && row < s.height;
        d[f] = inside ? load_at_most(map + size_t(row) * s.width + left, s.width - left) : Vector{};
      }
      transform_in(d, v, i, channel);
    }
  }

  void rows_out(int image, int filter, int first, int count, const Number* m) const {
    Number* map = y(image, filter);
    for (int i = 0; i < count; i++) {
      int top = (first + i) / groups * step, left = (first + i) % groups * lanes;
      Vector made[step];
      transform_out(m, i, filter, made);
      int wide = std::min(lanes, s.width - left);
      for (int r = 0; r < std::min(step, s.height - top); r++) {
        Number* to = map + size_t(top + r) * s.width + left;
        if (wide == lanes)
          store(to, made[r]);
        else
          std::memcpy(to, &made[r], sizeof(Number) * wide);
      }
    }
  }

  // 1x3 filters: vectors are parts of columns, and tiles run across. `stage` has `lanes` rows as columns.
  void columns_in(int image, int channel, int first, int count, Number* v, Number* stage) const {
    const Number* map = x(image, channel);
    for (int i = 0; i < count;) {
      int top = (first + i) / tiles * lanes, tile = (first + i) % tiles;
      int here = std::min(count - i, tiles - tile), left = tile * step - 1, columns = here * step + 2;
      int high = std::min(lanes, s.height - top);
      for (int j = 0; j < columns; j += lanes) {
        Vector square[lanes];
        for (int r = 0; r < lanes; r++) square[r] = r < high ? part_of_row(map + size_t(top + r) * s.width, left + j) : Vector{};
        transpose(square);
        for (int l = 0; l < lanes; l++) store(stage + (j + l) * lanes, square[l]);
      }
      for (int t = 0; t < here; t++) {
        Vector d[products];
        for (int f = 0; f < products; f++) d[f] = load(stage + (t * step + f) * lanes);
        transform_in(d, v, i + t, channel);
      }
      i += here;
    }
  }

  // `lanes` numbers of a row from column `left` on, zeros beyond its ends.
  Vector part_of_row(const Number* row, int left) const {
    if (left >= 0 && left + lanes <= s.width) return load(row + left);
    Number found[lanes] = {};
    for (int l = std::max(0, -left); l < lanes && left + l < s.width; l++) found[l] = row[left + l];
    return load(found);
  }

  void columns_out(int image, int filter, int first, int count, const Number* m, Number* stage) const {
    Number* map = y(image, filter);
    for (int i = 0; i < count;) {
      int top = (first + i) / tiles * lanes, tile = (first + i) % tiles;
      int here = std::min(count - i, tiles - tile), left = tile * step, columns = std::min(here * step, s.width - left);
      int high = std::min(lanes, s.height - top);
      for (int t = 0; t < here; t++) {
        Vector made[step];
        transform_out(m, i + t, filter, made);
        for (int f = 0; f < step; f++) store(stage + (t * step + f) * lanes, made[f]);
      }
      for (int j = 0; j < columns; j += lanes) {
        Vector square[lanes];
        for (int l = 0; l < lanes; l++) square[l] = load(stage + (j + l) * lanes);
        transpose(square);
        int wide = std::min(lanes, columns - j);
        for (int r = 0; r < high; r++) {
          Number* to = map + size_t(top + r) * s.width + left + j;
          if (wide == lanes)
            store(to, square[r]);
          else
            std::memcpy(to, &square[r], sizeof(Number) * wide);
        }
      }
      i += here;
    }
  }
};

template <int step>
void run_steps(const Strip& strip, int threads, const Parallel& parallel) {
  Runner<step> runner(strip, threads);
  parallel(runner.items(), [&](int item) { runner.item(item); });
}

void run_here(const Strip& strip, int threads, const Parallel& parallel) {
  strip.step == 6 ? run_steps<6>(strip, threads, parallel) : run_steps<4>(strip, threads, parallel);
}

// [product][block of filters][channel][rows], with zeros beyond the last filter.
template <int step>
void pack_steps(int filters, int channels, const Number* weight, Number* packed) {
  using Transform = Winograd<Vector, Number, step>;
  int blocks = parts(filters, rows);
  for (int f = 0; f < Transform::products; f++)
    for (int block = 0; block < blocks; block++)
      for (int c = 0; c < channels; c++)
        for (int r = 0; r < rows; r++, packed++) {
          int filter = block * rows + r;
          double sum = 0;
          for (int t = 0; t < 3 && filter < filters; t++)
            sum += Transform::weights[f][t] * double(weight[(size_t(filter) * channels + c) * 3 + t]);
          *packed = Number(sum);
        }
}

void pack_here(int step, int filters, int channels, const void* weight, void* packed) {
  const Number* from = static_cast<const Number*>(weight);
  Number* to = static_cast<Number*>(packed);
  step == 6 ? pack_steps<6>(filters, channels, from, to) : pack_steps<4>(filters, channels, from, to);
}

}  // namespace
}  // namespace strips
