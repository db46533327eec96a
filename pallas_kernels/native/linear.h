// x [B, K] times w [O, K] transposed, float32 result [B, O].
#pragma once

#include <atomic>

#include "panels.h"
#include "work.h"

namespace moe_ladder {

constexpr int64_t ITEM_BYTES = 64 << 10;  // weights read by one item of work

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t tiles_per_item(int64_t k) {
  const int64_t tiles = ITEM_BYTES / (TILE * k * static_cast<int64_t>(sizeof(bf16)));
  return tiles < 1 ? 1 : tiles;
}

// Items: a panel to pack each, then slices of the outputs.
class LinearJob final : public Job {
 public:
  LinearJob(const bf16* x, const bf16* w, float* out, bf16* scratch, int64_t num_rows, int64_t num_out, int64_t k)
      : x_(x), w_(w), out_(out), panels_(scratch), num_rows_(num_rows), num_out_(num_out), k_(k),
        split_(split_rows(num_rows, k % 2 == 0)), tiles_(divide_up(num_out, TILE)), per_item_(tiles_per_item(k)) {
    num_items_ = split_.num_panels + divide_up(tiles_, per_item_);
  }

 private:
  void run(int64_t item, int64_t next) override {
    if (item < split_.num_panels) {
      const int64_t row = item * PANEL;
      pack_panel(x_ + row * k_, smaller(PANEL, num_rows_ - row), k_, panels_ + row * k_);
      num_packed_.fetch_add(1, std::memory_order_release);
      return;
    }
    wait_until([this] { return num_packed_.load(std::memory_order_acquire) == split_.num_panels; });
    multiply((item - split_.num_panels) * per_item_, (next - split_.num_panels) * per_item_);
  }

  void multiply(int64_t first_tile, int64_t next_tile) {
    const int64_t end_tile = smaller(first_tile + per_item_, tiles_);
    const auto tile_at = [&](int64_t t) {
      return consecutive_tile(w_, (t == end_tile ? next_tile : t) * TILE, num_out_, k_);
    };
    panels_over_tiles(panels_, split_.num_panels, first_tile, end_tile, k_, tile_at, [this](int64_t p, int64_t t, auto& acc) {
      const int64_t row = p * PANEL;
      store_panels(acc, out_ + row * num_out_ + t * TILE, num_out_, num_rows_ - row, num_out_ - t * TILE);
    });
    const int64_t loose = num_rows_ - split_.num_loose;
    for (int64_t t = first_tile; t < end_tile; ++t) {
      tile_over_rows(x_ + loose * k_, k_, split_.num_loose, tile_at(t), tile_at(t + 1), k_, [&](int64_t row, int count, const auto& sums) {
        for (int r = 0; r < count; ++r)
          store_eight(out_ + (loose + row + r) * num_out_ + t * TILE, _mm256_set_m128(sums[r][1], sums[r][0]),
                      num_out_ - t * TILE);
      });
    }
  }

  const bf16 *x_, *w_;
  float* out_;
  bf16* panels_;
  int64_t num_rows_, num_out_, k_;
  RowSplit split_;
  int64_t tiles_, per_item_;
  std::atomic<int64_t> num_packed_{0};
};

}  // namespace moe_ladder
