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
// Work is divided by chunks and, if these are few, by filters: transforming the input twice costs less than waiting.
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
constexpr int most_panels = 8;             // in a chunk, so that the products of a block fit into L1

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

inline void store_at_most(Number* p, Vector v, int count) {
  count >= lanes ? store(p, v) : void(std::memcpy(p, &v, sizeof(Number) * count));
}

// The first half of a vector, or less of it.
inline void store_half(Number* p, Vector v, int count) {
  count >= lanes / 2 ? std::memcpy(p, &v, sizeof v / 2) : std::memcpy(p, &v, sizeof(Number) * count);
}

inline Vector load_at_most(const Number* p, int count) { return count >= lanes ? load(p) : load_part(p, count); }

inline Vector spread(Number n) {
  Vector v;
  for (int l = 0; l < lanes; l++) v[l] = n;
  return v;
}

#ifndef STRIPS_NEON
// NaN stays NaN in both.
inline Vector larger(Vector a, Vector b) { return (a > b) | (a != a) ? a : b; }
inline Vector rectify(Vector v) { return v < Vector{} ? Vector{} : v; }
#endif

template <int... i>
inline Vector zipped_low(Vector a, Vector b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i / 2 + i % 2 * lanes)...);
}
template <int... i>
inline Vector zipped_high(Vector a, Vector b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (lanes / 2 + i / 2 + i % 2 * lanes)...);
}

template <int... i>
inline Vector larger_neighbours(Vector v, std::integer_sequence<int, i...>) {
  return larger(__builtin_shufflevector(v, v, (2 * i % lanes)...), __builtin_shufflevector(v, v, ((2 * i + 1) % lanes)...));
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
  int along, beside;              // sizes of a map along the filters and across them
  int tiles, groups, vectors;     // vectors = tiles * groups
  int panels, in_chunk, chunks;   // vectors in the largest chunk
  int blocks, splits;             // of the filters
  int halve;                      // sizes of a map are shifted by this: 1 with a pool, else 0

  Runner(const Strip& strip, int threads) : s(strip), halve(strip.pool) {
    along = s.axis == Axis::down ? s.height : s.width, beside = s.axis == Axis::down ? s.width : s.height;
    tiles = parts(along, step), groups = parts(beside, lanes), vectors = tiles * groups;
    panels = parts(vectors, panel), blocks = parts(s.filters, rows);
    int fit = int(cache / (sizeof(Vector) * panel * products * s.channels));
    chunks = parts(panels, std::clamp(fit, 1, most_panels));
    splits = 1;
    if (s.images * chunks % threads) {
      int even = parts(chunks, threads) * threads;
      bool balanced = panels >= 10 * even / 9 && panels * 10 >= parts(panels, even) * even * 9;
      if (balanced)
        chunks = even;
      else if (s.images * chunks < 8 * threads)
        splits = std::min(blocks, threads);
    }
    in_chunk = parts(panels, chunks) * panel;
  }

  int items() const { return s.images * chunks * splits; }

  const Number* x(int image, int channel) const {
    return static_cast<const Number*>(s.x) + (size_t(image) * s.channels + channel) * s.height * s.width;
  }
  Number* y(int image, int filter) const {
    return static_cast<Number*>(s.y) + image * s.y_image + size_t(filter) * (s.height >> halve) * (s.width >> halve);
  }

  // Where a tile or a group begins. The last one overlaps the one before it where the map is not a multiple of its
  // size: it computes some results once more, and needs no parts of vectors. Tiles round differently, so those results
  // are left to the tile before.
  int tile_start(int tile) const { return std::max(0, std::min(tile * step, along - step)); }
  int group_start(int group) const { return std::max(0, std::min(group * lanes, beside - lanes)); }

  void item(int index) const {
    int split = index % splits, chunk = index / splits % chunks, image = index / splits / chunks;
    int from = int(int64_t(panels) * chunk / chunks), to = int(int64_t(panels) * (chunk + 1) / chunks);
    int first = from * panel, count = std::min(to * panel, vectors) - first, width = in_chunk * lanes;
    size_t inputs = size_t(products) * s.channels * width, results = size_t(products) * rows * width;
    size_t line = s.axis == Axis::across ? size_t(tiles * step + 2 + lanes) * lanes : 0;
    Number* v = scratch(inputs + results + line);
    Number *m = v + inputs, *stage = m + results;
    for (int c = 0; c < s.channels; c++)
      s.axis == Axis::down ? rows_in(image, c, first, count, v) : columns_in(image, c, first, count, v, stage);
    const Number* packed = static_cast<const Number*>(s.packed);
    for (int block = blocks * split / splits; block < blocks * (split + 1) / splits; block++) {
      for (int f = 0; f < products; f++)
        for (int p = 0; p < to - from; p++)
          multiply(packed + (size_t(f) * blocks + block) * s.channels * rows, v + f * plane() + size_t(p) * s.channels * panel * lanes,
                   m + size_t(f) * rows * width + p * panel * lanes, width, s.channels);
      for (int r = 0; r < std::min(rows, s.filters - block * rows); r++) {
        int filter = block * rows + r;
        s.axis == Axis::down ? rows_out(image, filter, first, count, m + r * width)
                             : columns_out(image, filter, first, count, m + r * width, stage);
      }
    }
  }

  size_t plane() const { return size_t(in_chunk) * s.channels * lanes; }  // numbers of one product

  void transform_in(const Vector* d, Number* v, int vector, int channel) const {
    Vector made[products];
    Transform::input(d, made);
    Number* to = v + ((size_t(vector / panel) * s.channels + channel) * panel + vector % panel) * lanes;
    for (int f = 0; f < products; f++) store(to + f * plane(), made[f]);
  }

  // Product f of a filter is `rows` lines of a chunk after product f - 1. Every output contains product 1 once, and
  // so the bias. With a pool, the larger of each two neighbours along the tile come first.
  void transform_out(const Number* m, int vector, Vector bias, Vector* made) const {
    Vector d[products];
    for (int f = 0; f < products; f++) d[f] = load(m + (size_t(f) * rows * in_chunk + vector) * lanes);
    d[1] += bias;
    Transform::output(d, made);
    if (s.pool)
      for (int i = 0; i < step / 2; i++) made[i] = larger(made[2 * i], made[2 * i + 1]);
    if (s.relu)
      for (int i = 0; i < step; i++) made[i] = rectify(made[i]);
  }

  // Calls put(i, made[i]) from `known` to `end`. All of a tile is the usual case, in which vectors stay in registers.
  template <class Put>
  void each_made(const Vector* made, int known, int end, const Put& put) const {
    if (known == 0 && end == step) {
#pragma GCC unroll 8
      for (int i = 0; i < step; i++) put(i, made[i]);
    } else if (known == 0 && end == step / 2) {
#pragma GCC unroll 8
      for (int i = 0; i < step / 2; i++) put(i, made[i]);
    } else {
      Vector kept[step];
      std::memcpy(kept, made, sizeof kept);
      for (int i = known; i < end; i++) put(i, kept[i]);
    }
  }

  Vector shift(int filter) const { return spread(s.bias ? static_cast<const Number*>(s.bias)[filter] : Number(0)); }

  // 3x1 filters: vectors are parts of rows, and tiles run down.
  void rows_in(int image, int channel, int first, int count, Number* v) const {
    const Number* map = x(image, channel);
    int tile = first / groups, group = first % groups;
    for (int i = 0; i < count; i++) {
      int top = tile_start(tile) - 1, left = group_start(group);
      const Number* from = map + ptrdiff_t(top) * s.width + left;
      Vector d[products];
      if (top >= 0 && top + products <= s.height && s.width >= lanes) {
        for (int f = 0; f < products; f++) d[f] = load(from + f * s.width);
      } else {
        for (int f = 0; f < products; f++)
          d[f] = top + f >= 0 && top + f < s.height ? load_at_most(from + f * s.width, s.width - left) : Vector{};
      }
      transform_in(d, v, i, channel);
      if (++group == groups) group = 0, tile++;
    }
  }

  void rows_out(int image, int filter, int first, int count, const Number* m) const {
    Number* map = y(image, filter);
    Vector bias = shift(filter);
    int tile = first / groups, group = first % groups, width = s.width >> halve;
    for (int i = 0; i < count; i++) {
      Vector made[step];
      transform_out(m, i, bias, made);
      int top = tile_start(tile), left = group_start(group), high = std::min(step, s.height - top) >> halve;
      int known = (tile * step - top) >> halve;
      Number* to = map + size_t(top >> halve) * width + (left >> halve);
      auto put = [&](int r, Vector v) {
        s.pool ? store_half(to + r * width, larger_neighbours(v, std::make_integer_sequence<int, lanes>()), width - left / 2)
               : store_at_most(to + r * width, v, width - left);
      };
      each_made(made, known, high, put);
      if (++group == groups) group = 0, tile++;
    }
  }

  // 1x3 filters: vectors are parts of columns, and tiles run across. `stage` has `lanes` rows as columns.
  void columns_in(int image, int channel, int first, int count, Number* v, Number* stage) const {
    const Number* map = x(image, channel);
    for (int i = 0; i < count;) {
      int group = (first + i) / tiles, tile = (first + i) % tiles, here = std::min(count - i, tiles - tile);
      int top = group_start(group), left = tile_start(tile) - 1, end = tile_start(tile + here - 1) + step + 1;
      if (left < 0) store(stage, Vector{});
      for (int column = s.width; column < end; column++) store(stage + (column - left) * lanes, Vector{});
      columns_of(map + size_t(top) * s.width, s.height - top, std::max(left, 0), std::min(end, s.width), stage - left * lanes);
      for (int t = 0; t < here; t++) {
        Vector d[products];
        const Number* from = stage + (tile_start(tile + t) - 1 - left) * lanes;
        for (int f = 0; f < products; f++) d[f] = load(from + f * lanes);
        transform_in(d, v, i + t, channel);
      }
      i += here;
    }
  }

  // Columns `left` to `end` of `lanes` rows, one vector each; rows beyond `high` are zeros.
  void columns_of(const Number* from, int high, int left, int end, Number* stage) const {
    for (int j = left; j < end; j += lanes) {
      int column = std::max(0, std::min(j, s.width - lanes));
      Vector square[lanes];
      if (high >= lanes && s.width >= lanes) {
        for (int r = 0; r < lanes; r++) square[r] = load(from + r * s.width + column);
      } else {
        for (int r = 0; r < lanes; r++)
          square[r] = r < high ? load_at_most(from + r * s.width + column, s.width - column) : Vector{};
      }
      transpose(square);
      for (int l = std::max(0, left - column); l < lanes; l++)
        if (column + l < end) store(stage + (column + l) * lanes, square[l]);
    }
  }

  void columns_out(int image, int filter, int first, int count, const Number* m, Number* stage) const {
    Number* map = y(image, filter);
    Vector bias = shift(filter);
    int width = s.width >> halve;
    for (int i = 0; i < count;) {
      int group = (first + i) / tiles, tile = (first + i) % tiles, here = std::min(count - i, tiles - tile);
      int top = group_start(group), left = tile * step >> halve, high = std::min(lanes, s.height - top) >> halve;
      int end = std::min(tile_start(tile + here - 1) + step, s.width) >> halve;
      for (int t = 0; t < here; t++) {
        Vector made[step];
        transform_out(m, i + t, bias, made);
        int start = tile_start(tile + t), known = ((tile + t) * step - start) >> halve;
        Number* to = stage + ((start >> halve) - left) * lanes;
        each_made(made, known, step >> halve, [&](int f, Vector v) { store(to + f * lanes, v); });
      }
      for (int j = left; j < end; j += lanes) {
        int column = std::max(left, std::min(j, end - lanes));
        Vector square[lanes];
        for (int l = 0; l < lanes; l++) square[l] = load(stage + (column - left + l) * lanes);
        transpose(square);
        Number* to = map + size_t(top >> halve) * width + column;
        for (int r = 0; r < high; r++)
          store_at_most(to + r * width, s.pool ? larger(square[2 * r], square[2 * r + 1]) : square[r], end - column);
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

// With `ceil` a last row or column without a partner is kept.
void pool_here(int maps, int height, int width, bool ceil, const void* x, void* y) {
  const Number* from = static_cast<const Number*>(x);
  Number* to = static_cast<Number*>(y);
  for (int map = 0; map < maps; map++, from += size_t(height) * width)
    for (int i = 0; i < height - !ceil; i += 2)
      for (int j = 0; j < width - !ceil; j += 2) {
        Number most = from[size_t(i) * width + j];
        for (int k = i; k < std::min(i + 2, height); k++)
          for (int l = j; l < std::min(j + 2, width); l++) {
            Number other = from[size_t(k) * width + l];
            most = most > other || most != most ? most : other;
          }
        *to++ = most;
      }
}

}  // namespace
}  // namespace strips
