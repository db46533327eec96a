// The gated MLP of routed experts over rows sorted by expert.
//
// Items in order: pack panels of x; gate_up of every expert in slices of its hidden width; down of every expert in slices of
// its outputs. A slice of gate_up waits for its expert's panels, a slice of down for its expert's hidden rows. Each weight
// is read once from memory, whatever the rows of its expert.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "activations.h"
#include "linear.h"

namespace moe_ladder {

struct MlpShape {
  int64_t num_rows, num_experts, d, f;
};

// An expert that has rows.
struct Group {
  int64_t expert, first_row, num_rows;
  RowSplit split;
  int64_t first_panel;  // in the packed buffers, counted over all groups
};

// Panels of all groups never hold more rows than this: a panel holds at least MAX_LOOSE_ROWS + 1.
inline int64_t max_panel_rows(int64_t num_rows) { return (num_rows * PANEL + MAX_LOOSE_ROWS) / (MAX_LOOSE_ROWS + 1); }

// Elements of scratch: x and hidden in panels, hidden of loose rows.
inline int64_t scratch_elements(const MlpShape& s) {
  return max_panel_rows(s.num_rows) * (s.d + s.f) + s.num_rows * s.f;
}

class ExpertMlpJob final : public Job {
 public:
  ExpertMlpJob(const bf16* x, const bf16* w_gate_up, const bf16* w_down, const int32_t* group_sizes, bf16* out,
               bf16* scratch, const MlpShape& shape, Activation activation)
      : x_(x), w_gate_up_(w_gate_up), w_down_(w_down), out_(out), x_panels_(scratch), s_(shape), activation_(activation) {
    plan_groups(group_sizes);
    hidden_panels_ = x_panels_ + max_panel_rows(s_.num_rows) * s_.d;
    hidden_ = hidden_panels_ + max_panel_rows(s_.num_rows) * s_.f;
    num_packed_ = std::make_unique<std::atomic<int64_t>[]>(groups_.size());
    num_hidden_ = std::make_unique<std::atomic<int64_t>[]>(groups_.size());
    for (size_t g = 0; g < groups_.size(); ++g) num_packed_[g] = num_hidden_[g] = 0;
    gate_up_tiles_ = divide_up(s_.f, TILE / 2);
    down_tiles_ = divide_up(s_.d, TILE);
    gate_up_per_item_ = tiles_per_item(s_.d);
    down_per_item_ = tiles_per_item(s_.f);
    gate_up_items_ = divide_up(gate_up_tiles_, gate_up_per_item_);
    down_items_ = divide_up(down_tiles_, down_per_item_);
    const int64_t num_groups = static_cast<int64_t>(groups_.size());
    num_items_ = static_cast<int64_t>(panel_group_.size()) + num_groups * (gate_up_items_ + down_items_);
  }

  int64_t num_real_rows() const { return num_real_rows_; }

 private:
  // Sizes come from the device unchecked: what goes below zero or past the rows is cut off.
  void plan_groups(const int32_t* sizes) {
    const bool can_use_panels = s_.d % 2 == 0 && s_.f % 2 == 0;
    for (int64_t e = 0; e < s_.num_experts; ++e) {
      const int64_t rows = smaller(sizes[e], s_.num_rows - num_real_rows_);
      if (rows <= 0) continue;
      const RowSplit split = split_rows(rows, can_use_panels);
      groups_.push_back({e, num_real_rows_, rows, split, static_cast<int64_t>(panel_group_.size())});
      panel_group_.insert(panel_group_.end(), split.num_panels, static_cast<int64_t>(groups_.size()) - 1);
      num_real_rows_ += rows;
    }
  }

  void run(int64_t item, int64_t next) override {
    const int64_t num_panels = static_cast<int64_t>(panel_group_.size());
    if (item < num_panels) return pack(item);
    const int64_t slice = item - num_panels;
    const int64_t num_gate_up = static_cast<int64_t>(groups_.size()) * gate_up_items_;
    if (slice < num_gate_up) return gate_up(slice, next - num_panels);
    down(slice - num_gate_up, next - num_panels);
  }

  // The first tile of a slice, counted over gate_up and down; past the last, any address.
  Tile first_tile(int64_t slice) const {
    const int64_t num_gate_up = static_cast<int64_t>(groups_.size()) * gate_up_items_;
    if (slice < num_gate_up)
      return gate_up_tile(groups_[slice / gate_up_items_], slice % gate_up_items_ * gate_up_per_item_);
    const int64_t index = smaller((slice - num_gate_up) / down_items_, static_cast<int64_t>(groups_.size()) - 1);
    return down_tile(groups_[index], (slice - num_gate_up) % down_items_ * down_per_item_);
  }

  void pack(int64_t panel) {
    const int64_t index = panel_group_[panel];
    const Group& g = groups_[index];
    const int64_t done = (panel - g.first_panel) * PANEL;
    pack_panel(x_ + (g.first_row + done) * s_.d, smaller(PANEL, g.num_rows - done), s_.d, x_panels_ + panel * PANEL * s_.d);
    num_packed_[index].fetch_add(1, std::memory_order_release);
  }

  void gate_up(int64_t slice, int64_t next_slice) {
    const int64_t index = slice / gate_up_items_, first = slice % gate_up_items_ * gate_up_per_item_;
    const Group& g = groups_[index];
    const int64_t end = smaller(first + gate_up_per_item_, gate_up_tiles_);
    wait_until([&] { return num_packed_[index].load(std::memory_order_acquire) == g.split.num_panels; });
    const auto tile_at = [&](int64_t t) { return t == end ? first_tile(next_slice) : gate_up_tile(g, t); };
    const bf16* panels = x_panels_ + g.first_panel * PANEL * s_.d;
    panels_over_tiles(panels, g.split.num_panels, first, end, s_.d, tile_at, [&](int64_t p, int64_t t, auto& acc) {
      store_hidden_panels(acc, hidden_panels_ + (g.first_panel + p) * PANEL * s_.f, t * TILE / 2);
    });
    const int64_t loose = g.first_row + g.num_rows - g.split.num_loose;
    for (int64_t t = first; t < end; ++t) {
      tile_over_rows(x_ + loose * s_.d, s_.d, g.split.num_loose, tile_at(t), tile_at(t + 1), s_.d, [&](int64_t row, int count, auto& sums) {
        store_hidden_rows(sums, hidden_ + (loose + row) * s_.f, count, t * TILE / 2);
      });
    }
    num_hidden_[index].fetch_add(1, std::memory_order_release);
  }

  void down(int64_t slice, int64_t next_slice) {
    const int64_t index = slice / down_items_, first = slice % down_items_ * down_per_item_;
    const Group& g = groups_[index];
    const int64_t end = smaller(first + down_per_item_, down_tiles_);
    wait_until([&] { return num_hidden_[index].load(std::memory_order_acquire) == gate_up_items_; });
    const auto tile_at = [&](int64_t t) { return t == end ? first_tile(next_slice) : down_tile(g, t); };
    const bf16* panels = hidden_panels_ + g.first_panel * PANEL * s_.f;
    panels_over_tiles(panels, g.split.num_panels, first, end, s_.f, tile_at, [&](int64_t p, int64_t t, auto& acc) {
      bf16* out = out_ + (g.first_row + p * PANEL) * s_.d + t * TILE;
      store_panels(acc, out, s_.d, g.num_rows - p * PANEL, s_.d - t * TILE);
    });
    const int64_t loose = g.first_row + g.num_rows - g.split.num_loose;
    for (int64_t t = first; t < end; ++t) {
      tile_over_rows(hidden_ + loose * s_.f, s_.f, g.split.num_loose, tile_at(t), tile_at(t + 1), s_.f, [&](int64_t row, int count, auto& sums) {
        for (int r = 0; r < count; ++r)
          store_eight(out_ + (loose + row + r) * s_.d + t * TILE, _mm256_set_m128(sums[r][1], sums[r][0]), s_.d - t * TILE);
      });
    }
  }

  // Four rows of gate and the same four of up.
  Tile gate_up_tile(const Group& g, int64_t index) const {
    const bf16* gate = w_gate_up_ + g.expert * 2 * s_.f * s_.d;
    Tile tile;
    for (int j = 0; j < TILE / 2; ++j) {
      const int64_t row = smaller(index * TILE / 2 + j, s_.f - 1);
      tile.w[j] = gate + row * s_.d;
      tile.w[j + TILE / 2] = gate + (s_.f + row) * s_.d;
    }
    return tile;
  }

  Tile down_tile(const Group& g, int64_t index) const {
    return consecutive_tile(w_down_ + g.expert * s_.d * s_.f, index * TILE, s_.d, s_.f);
  }

  // Two hidden columns of 16 rows make one vector of a panel, for the pairs of the next product.
  template <int P>
  void store_hidden_panels(const __m512 (&acc)[TILE][P], bf16* panels, int64_t column) const {
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
      for (int j = 0; j < TILE / 2; j += 2) {
        if (column + j >= s_.f) break;
        const __m512 even = _mm512_mul_ps(activate(activation_, acc[j][p]), acc[4 + j][p]);
        const __m512 odd = _mm512_mul_ps(activate(activation_, acc[j + 1][p]), acc[5 + j][p]);
        const __m512i lo = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
        const __m512i hi = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
        _mm512_storeu_si512(panels + (p * s_.f + column + j) * PANEL, _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
      }
  }

  void store_hidden_rows(const __m128 (*sums)[2], bf16* hidden, int count, int64_t column) const {
    __m128 gate[4] = {}, up[4] = {};
    for (int r = 0; r < count; ++r) gate[r] = sums[r][0], up[r] = sums[r][1];
    const __m512 h = _mm512_mul_ps(activate(activation_, _mm512_loadu_ps(gate)), _mm512_loadu_ps(up));
    bf16 rounded[16];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), (__m256i)_mm512_cvtneps_pbh(h));
    const int64_t width = smaller(TILE / 2, s_.f - column);
    for (int r = 0; r < count; ++r) std::memcpy(hidden + r * s_.f + column, rounded + 4 * r, width * sizeof(bf16));
  }

  const bf16 *x_, *w_gate_up_, *w_down_;
  bf16 *out_, *x_panels_, *hidden_panels_ = nullptr, *hidden_ = nullptr;
  MlpShape s_;
  Activation activation_;
  std::vector<Group> groups_;
  std::vector<int64_t> panel_group_;  // the group of each panel
  std::unique_ptr<std::atomic<int64_t>[]> num_packed_, num_hidden_;
  int64_t gate_up_tiles_, down_tiles_, gate_up_per_item_, down_per_item_, gate_up_items_, down_items_;
  int64_t num_real_rows_ = 0;
};

}  // namespace moe_ladder
