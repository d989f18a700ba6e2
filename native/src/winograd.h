// Winograd's minimal filtering F(m, 3) along one axis [Lavin and Gray 2016]: m outputs out of m + 2 products.
// T is a number or a vector of numbers, so that one transform handles several rows at a time; S is the number.
#pragma once

template <class T, class S, int m>
struct Winograd;

template <class T, class S>
struct Winograd<T, S, 4> {
  static constexpr int products = 6;
  static constexpr double weights[6][3] = {{1 / 4., 0, 0},           {-1 / 6., -1 / 6., -1 / 6.}, {-1 / 6., 1 / 6., -1 / 6.},
                                           {1 / 24., 1 / 12., 1 / 6.}, {1 / 24., -1 / 12., 1 / 6.}, {0, 0, 1}};

  static inline void input(const T* d, T* v) {
    v[0] = S(4) * d[0] - S(5) * d[2] + d[4];
    T even = d[4] - S(4) * d[2], odd = d[3] - S(4) * d[1];
    v[1] = even + odd;
    v[2] = even - odd;
    even = d[4] - d[2], odd = S(2) * (d[3] - d[1]);
    v[3] = even + odd;
    v[4] = even - odd;
    v[5] = S(4) * d[1] - S(5) * d[3] + d[5];
  }

  static inline void output(const T* m, T* y) {
    T p = m[1] + m[2], q = m[1] - m[2], r = m[3] + m[4], s = m[3] - m[4];
    y[0] = m[0] + p + r;
    y[1] = q + S(2) * s;
    y[2] = p + S(4) * r;
    y[3] = q + S(8) * s + m[5];
  }
};

template <class T, class S>
struct Winograd<T, S, 6> {
  static constexpr int products = 8;
  static constexpr double weights[8][3] = {{1, 0, 0},
                                           {-2 / 9., -2 / 9., -2 / 9.},
                                           {-2 / 9., 2 / 9., -2 / 9.},
                                           {1 / 90., 1 / 45., 2 / 45.},
                                           {1 / 90., -1 / 45., 2 / 45.},
                                           {32 / 45., 16 / 45., 8 / 45.},
                                           {32 / 45., -16 / 45., 8 / 45.},
                                           {0, 0, 1}};

  static inline void input(const T* d, T* v) {
    v[0] = d[0] - d[6] + S(5.25) * (d[4] - d[2]);
    T even = d[2] + d[6] - S(4.25) * d[4], odd = d[1] + d[5] - S(4.25) * d[3];
    v[1] = even + odd;
    v[2] = even - odd;
    even = d[6] + S(.25) * d[2] - S(1.25) * d[4], odd = S(.5) * d[1] - S(2.5) * d[3] + S(2) * d[5];
    v[3] = even + odd;
    v[4] = even - odd;
    even = d[6] + S(4) * d[2] - S(5) * d[4], odd = S(2) * d[1] - S(2.5) * d[3] + S(.5) * d[5];
    v[5] = even + odd;
    v[6] = even - odd;
    v[7] = d[7] - d[1] + S(5.25) * (d[3] - d[5]);
  }

  // The weights of products 5 and 6 carry a factor of 32, which the outputs do without.
  static inline void output(const T* m, T* y) {
    T p = m[1] + m[2], q = m[1] - m[2], r = m[3] + m[4], s = m[3] - m[4], t = m[5] + m[6], u = m[5] - m[6];
    y[0] = m[0] + p + r + t;
    y[1] = q + S(2) * s + S(1 / 2.) * u;
    y[2] = p + S(4) * r + S(1 / 4.) * t;
    y[3] = q + S(8) * s + S(1 / 8.) * u;
    y[4] = p + S(16) * r + S(1 / 16.) * t;
    y[5] = m[7] + q + S(32) * s + S(1 / 32.) * u;
  }
};
