// Rows into panels and results out of them.
#pragma once

#include "gemm.h"

namespace moe_ladder {

// How the rows of one group are split: whole panels first, then loose rows.
struct RowSplit {
  int64_t num_panels, num_loose;
};

inline RowSplit split_rows(int64_t num_rows, bool can_use_panels) {
  if (!can_use_panels) return {0, num_rows};
  const int64_t rest = num_rows % PANEL;
  if (rest > MAX_LOOSE_ROWS) return {num_rows / PANEL + 1, 0};
  return {num_rows / PANEL, rest};
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// v[i] lane j becomes v[j] lane i, 32-bit lanes.
inline void transpose_16x16(__m512i (&v)[16]) {
  __m512i t[16];
#pragma GCC unroll 4
  for (int g = 0; g < 16; g += 4) {
    const __m512i a = _mm512_unpacklo_epi32(v[g], v[g + 1]), b = _mm512_unpackhi_epi32(v[g], v[g + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[g + 2], v[g + 3]), d = _mm512_unpackhi_epi32(v[g + 2], v[g + 3]);
    t[g] = _mm512_unpacklo_epi64(a, c);
    t[g + 1] = _mm512_unpackhi_epi64(a, c);
    t[g + 2] = _mm512_unpacklo_epi64(b, d);
    t[g + 3] = _mm512_unpackhi_epi64(b, d);
  }
  // t[4g + i], 128-bit lane l: column 4l + i of rows 4g to 4g + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even_lo = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88), odd_lo = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    const __m512i even_hi = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    const __m512i odd_hi = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
    v[i] = _mm512_shuffle_i32x4(even_lo, even_hi, 0x88);
    v[8 + i] = _mm512_shuffle_i32x4(even_lo, even_hi, 0xdd);
    v[4 + i] = _mm512_shuffle_i32x4(odd_lo, odd_hi, 0x88);
    v[12 + i] = _mm512_shuffle_i32x4(odd_lo, odd_hi, 0xdd);
  }
}

// Up to 16 rows of x [*, k] (k even) into one panel [k / 2][16][2]; rows that are missing become zeros.
inline void pack_panel(const bf16* x, int64_t num_rows, int64_t k, bf16* panel) {
  const int64_t num_pairs = k / 2;
  for (int64_t i = 0; i < num_pairs; i += 16) {
    const int64_t left = smaller(16, num_pairs - i);
    const __mmask16 mask = static_cast<__mmask16>((1u << left) - 1);
    __m512i v[16];
    for (int r = 0; r < 16; ++r)
      v[r] = r < num_rows ? _mm512_maskz_loadu_epi32(mask, x + r * k + 2 * i) : _mm512_setzero_si512();
    transpose_16x16(v);
    for (int64_t j = 0; j < left; ++j) _mm512_storeu_si512(panel + (i + j) * 2 * PANEL, v[j]);
  }
}

// Four results a row for 16 rows: t[j], 128-bit lane l, is row 4l + j.
inline void rows_of_four(__m512 a, __m512 b, __m512 c, __m512 d, __m512 (&t)[4]) {
  const __m512d ab_lo = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_hi = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
  const __m512d cd_lo = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_hi = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  t[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_lo, cd_lo));
  t[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_lo, cd_lo));
  t[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_hi, cd_hi));
  t[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_hi, cd_hi));
}

// `count` of eight results to one row, in the type of the output.
inline void store_eight(bf16* out, __m256 v, int64_t count) {
  const __m128i rounded = (__m128i)_mm256_cvtneps_pbh(v);
  if (count >= TILE) _mm_storeu_si128(reinterpret_cast<__m128i*>(out), rounded);
  else std::memcpy(out, &rounded, count * sizeof(bf16));
}
inline void store_eight(float* out, __m256 v, int64_t count) {
  if (count >= TILE) _mm256_storeu_ps(out, v);
  else std::memcpy(out, &v, count * sizeof(float));
}

// Results of one tile and P panels to out [*, ldo], columns [0, count), rows [0, num_rows).
template <class Out, int P>
inline void store_panels(const __m512 (&acc)[TILE][P], Out* out, int64_t ldo, int64_t num_rows, int64_t count) {
#pragma GCC unroll 3
  for (int p = 0; p < P; ++p) {
    __m512 left[4], right[4];
    rows_of_four(acc[0][p], acc[1][p], acc[2][p], acc[3][p], left);
    rows_of_four(acc[4][p], acc[5][p], acc[6][p], acc[7][p], right);
    const auto* l = reinterpret_cast<const __m128*>(left);
    const auto* r = reinterpret_cast<const __m128*>(right);
    const int64_t last = smaller(PANEL, num_rows - p * PANEL);
    for (int64_t row = 0; row < last; ++row) {
      const int64_t from = (row % 4) * 4 + row / 4;
      store_eight(out + (p * PANEL + row) * ldo, _mm256_set_m128(r[from], l[from]), count);
    }
  }
}

}  // namespace moe_ladder
