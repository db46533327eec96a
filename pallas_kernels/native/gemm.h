// Products of a few rows with eight rows of a weight matrix; both operands are contiguous along the contraction.
//
// Two forms, both with _mm512_dpbf16_ps (pairs of bf16 products summed in float32):
//   rows    up to 3 rows at a time, 32 elements of the contraction a step. Loads each weight vector once for all rows and sums
//           the lanes at the end. For up to MAX_LOOSE_ROWS rows, where memory is the bound.
//   panels  16 rows a panel, stored as [K / 2][16 rows][2]: a pair of weights is broadcast against 16 rows, no sums
//           across lanes. For everything else. Needs an even contraction.
// A tile is always eight weight rows. Where fewer are left, the last is repeated and its result dropped.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moe_ladder {

using bf16 = uint16_t;
constexpr int TILE = 8;
constexpr int PANEL = 16;
constexpr int64_t MAX_LOOSE_ROWS = 12;  // a remainder of more rows costs less as a panel

struct Tile {
  const bf16* w[TILE];
};

inline __m512bh load_bf16(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
// Into the second-level cache: it has more misses in flight than the first (measured: docs/moe_on_cpu.md).
inline void fetch(const bf16* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// The sums over all lanes of four vectors.
inline __m128 lane_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// sums[r][0] holds the products of row r with w[0..3], sums[r][1] with w[4..7]. Meanwhile fetches next[0] to next[FETCH - 1].
template <int R, int FETCH>
inline void multiply_rows(const bf16* x, int64_t ldx, const Tile& tile, int64_t k, const bf16* const* next, __m128 (*sums)[2]) {
  __m512 acc[R][TILE];
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < TILE; ++j) acc[r][j] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    __m512bh xs[R];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) xs[r] = load_bf16(x + r * ldx + i);
#pragma GCC unroll 8
    for (int j = 0; j < TILE; ++j) {
      const __m512bh w = load_bf16(tile.w[j] + i);
      if (j < FETCH) fetch(next[j] + i);
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], xs[r], w);
    }
  }
  if (i < k) {
    const __mmask32 mask = (1u << (k - i)) - 1;
#pragma GCC unroll 8
    for (int j = 0; j < TILE; ++j) {
      const __m512bh w = (__m512bh)_mm512_maskz_loadu_epi16(mask, tile.w[j] + i);
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r)
        acc[r][j] = _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_maskz_loadu_epi16(mask, x + r * ldx + i), w);
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r) {
    sums[r][0] = lane_sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    sums[r][1] = lane_sums(acc[r][4], acc[r][5], acc[r][6], acc[r][7]);
  }
}

// acc[j][p] holds the products of w[j] with the 16 rows of panel p. Meanwhile fetches `next`, unless null.
template <int P>
inline void multiply_panels(const bf16* panels, const Tile& tile, int64_t k, const Tile* next, __m512 (&acc)[TILE][P]) {
#pragma GCC unroll 8
  for (int j = 0; j < TILE; ++j)
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p) acc[j][p] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 32) {
    if (next) {
#pragma GCC unroll 8
      for (int j = 0; j < TILE; ++j) fetch(next->w[j] + i);
    }
    const int64_t end = i + 32 < k ? i + 32 : k;
    for (int64_t pair = i; pair < end; pair += 2) {
      __m512bh xs[P];
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) xs[p] = load_bf16(panels + (p * k + pair) * PANEL);
#pragma GCC unroll 8
      for (int j = 0; j < TILE; ++j) {
        int32_t both;
        std::memcpy(&both, tile.w[j] + pair, 4);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 3
        for (int p = 0; p < P; ++p) acc[j][p] = _mm512_dpbf16_ps(acc[j][p], xs[p], w);
      }
    }
  }
}

template <int FETCH>
inline void multiply_up_to_three(int num_rows, const bf16* x, int64_t ldx, const Tile& tile, int64_t k,
                                 const bf16* const* next, __m128 (*sums)[2]) {
  if (num_rows == 1) multiply_rows<1, FETCH>(x, ldx, tile, k, next, sums);
  else if (num_rows == 2) multiply_rows<2, FETCH>(x, ldx, tile, k, next, sums);
  else multiply_rows<3, FETCH>(x, ldx, tile, k, next, sums);
}

// `left` rows or panels are taken three at a time, but four as two and two.
inline int next_take(int64_t left) { return left == 4 ? 2 : left < 3 ? static_cast<int>(left) : 3; }

// Loose rows against one tile: emit(first row, number of rows, sums). Every pass fetches its share of the next tile, so that
// memory is busy from the first to the last.
template <class Emit>
inline void tile_over_rows(const bf16* x, int64_t ldx, int64_t num_rows, const Tile& tile, const Tile& next, int64_t k,
                           Emit emit) {
  const bf16* to_fetch[TILE + 2];  // three passes fetch 3, 3 and 3 of 8
  for (int j = 0; j < TILE + 2; ++j) to_fetch[j] = next.w[j < TILE ? j : TILE - 1];
  const int64_t num_passes = (num_rows + 2) / 3;
  int fetched = 0;
  __m128 sums[3][2];
  for (int64_t row = 0; row < num_rows;) {
    const int take = next_take(num_rows - row);
    const bf16* first = x + row * ldx;
    const bf16* const* from = to_fetch + fetched;
    if (num_passes == 1) multiply_up_to_three<8>(take, first, ldx, tile, k, from, sums);
    else if (num_passes == 2) multiply_up_to_three<4>(take, first, ldx, tile, k, from, sums), fetched += 4;
    else if (num_passes == 3) multiply_up_to_three<3>(take, first, ldx, tile, k, from, sums), fetched += 3;
    else multiply_up_to_three<2>(take, first, ldx, tile, k, from, sums), fetched += 2;
    fetched = fetched < TILE ? fetched : 0;
    emit(row, take, sums);
    row += take;
  }
}

// Panels in groups of three or two, each group over all tiles of [first_tile, end_tile): its rows stay in cache. The first group
// fetches the next tile; tile_at(end_tile) is what this thread reads after the last. emit(first panel, tile, acc).
template <class TileAt, class Emit>
inline void panels_over_tiles(const bf16* panels, int64_t num_panels, int64_t first_tile, int64_t end_tile, int64_t k,
                              TileAt tile_at, Emit emit) {
  for (int64_t p = 0; p < num_panels;) {
    const int take = next_take(num_panels - p);
    const bf16* first = panels + p * k * PANEL;
    for (int64_t t = first_tile; t < end_tile; ++t) {
      const Tile tile = tile_at(t), after = tile_at(t + 1);
      const Tile* next = p == 0 ? &after : nullptr;
      if (take == 1) {
        __m512 acc[TILE][1];
        multiply_panels<1>(first, tile, k, next, acc);
        emit(p, t, acc);
      } else if (take == 2) {
        __m512 acc[TILE][2];
        multiply_panels<2>(first, tile, k, next, acc);
        emit(p, t, acc);
      } else {
        __m512 acc[TILE][3];
        multiply_panels<3>(first, tile, k, next, acc);
        emit(p, t, acc);
      }
    }
    p += take;
  }
}

// Eight consecutive rows of w [num_out, k] from `first` on.
inline Tile consecutive_tile(const bf16* w, int64_t first, int64_t num_out, int64_t k) {
  Tile tile;
  for (int j = 0; j < TILE; ++j) tile.w[j] = w + (first + j < num_out ? first + j : num_out - 1) * k;
  return tile;
}

}  // namespace moe_ladder
