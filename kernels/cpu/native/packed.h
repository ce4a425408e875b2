// Packed weights in memory of their own: the only copy. Knows nothing of Python and nothing of instruction sets.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "table.h"

namespace edge {

struct Free {
    void operator()(char* p) const { std::free(p); }
};

inline std::unique_ptr<char, Free> aligned_bytes(size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, bytes ? bytes : 64) != 0) throw std::bad_alloc();
    return std::unique_ptr<char, Free>(static_cast<char*>(p));
}

// A weight [N, K] in panels of 16 outputs, layout as in table.h. Built empty, filled row by row, then never changed.
class PackedPanels {
  public:
    PackedPanels(int64_t N, int64_t K, int format) {
        const int64_t panels = (N + 15) / 16, padded = K + (K & 1);
        view_.format = format;
        view_.num_outputs = N;
        view_.num_inputs = K;
        view_.panel_bytes = padded * 16 * item_bytes();
        nbytes_ = panels * view_.panel_bytes;
        bytes_ = aligned_bytes(static_cast<size_t>(nbytes_));
        std::memset(bytes_.get(), 0, static_cast<size_t>(nbytes_));
        view_.data = bytes_.get();
    }

    const Panels& view() const { return view_; }
    int64_t nbytes() const { return nbytes_; }
    int64_t item_bytes() const { return view_.format == F32 ? 4 : 2; }

    void fill(int64_t first, const void* rows, int64_t count) {
        if (view_.format == F32)
            fill_as(first, static_cast<const uint32_t*>(rows), count);
        else
            fill_as(first, static_cast<const uint16_t*>(rows), count);
    }

    void widen_row(int64_t n, float* out) const {
        for (int64_t k = 0; k < view_.num_inputs; ++k) {
            const char* from = bytes_.get() + index(n, k) * item_bytes();
            if (view_.format == F32) {
                std::memcpy(out + k, from, 4);
                continue;
            }
            uint16_t half;
            std::memcpy(&half, from, 2);
            const uint32_t wide = view_.format == BF16 ? uint32_t(half) << 16 : float16_bits(half);
            std::memcpy(out + k, &wide, 4);
        }
    }

  private:
    int64_t index(int64_t n, int64_t k) const {
        const int64_t panel = n / 16 * (view_.panel_bytes / item_bytes()), lane = n % 16;
        return view_.format == BF16 ? panel + k / 2 * 32 + lane * 2 + k % 2 : panel + k * 16 + lane;
    }

    template <class Item>
    void fill_as(int64_t first, const Item* rows, int64_t count) {
        Item* to = reinterpret_cast<Item*>(bytes_.get());
        const int64_t K = view_.num_inputs;
        for (int64_t begin = 0; begin < count;) {  // panel by panel: writes stay in a few lines of cache
            const int64_t lane = (first + begin) % 16, end = begin + std::min<int64_t>(16 - lane, count - begin);
            for (int64_t k = 0; k < K; ++k)
                for (int64_t n = begin; n < end; ++n) to[index(first + n, k)] = rows[n * K + k];
            begin = end;
        }
    }

    static uint32_t float16_bits(uint16_t half) {
        const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
        if (rest >= 0x7c00) return sign | 0x7f800000u | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000u : 0u);
        uint32_t bits = rest << 13;  // a float whose exponent is 112 too small, subnormals included
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude *= 0x1p112f;
        std::memcpy(&bits, &magnitude, 4);
        return sign | bits;
    }

    Panels view_{};
    int64_t nbytes_ = 0;
    std::unique_ptr<char, Free> bytes_;
};

// One routed expert: gate and up as one weight of 2 * (F up to a whole panel) outputs, down, and what is between them.
class PackedExpert {
  public:
    PackedExpert(std::shared_ptr<PackedPanels> gate_up, std::shared_ptr<PackedPanels> down, int activation, float alpha,
                 float limit, bool has_biases)
        : gate_up_(std::move(gate_up)), down_(std::move(down)) {
        view_ = {gate_up_->view(), down_->view(), activation, alpha, limit, nullptr, nullptr};
        if (!has_biases) return;
        const int64_t inner = (view_.gate_up.num_outputs + 15) / 16 * 16, outer = (view_.down.num_outputs + 15) / 16 * 16;
        bias_bytes_ = (inner + outer) * 4;
        biases_ = aligned_bytes(static_cast<size_t>(bias_bytes_));
        std::memset(biases_.get(), 0, static_cast<size_t>(bias_bytes_));
        view_.inner_bias = reinterpret_cast<float*>(biases_.get());
        view_.down_bias = view_.inner_bias + inner;
    }
    const Expert& view() const { return view_; }
    int64_t nbytes() const { return gate_up_->nbytes() + down_->nbytes() + bias_bytes_; }
    // Biases from output `first` on, those of gate_up before those of down.
    void fill_bias(int64_t first, const float* values, int64_t count) {
        std::memcpy(biases_.get() + first * 4, values, static_cast<size_t>(count) * 4);
    }

  private:
    std::shared_ptr<PackedPanels> gate_up_, down_;
    std::unique_ptr<char, Free> biases_;
    int64_t bias_bytes_ = 0;
    Expert view_;
};

// One weight per head, all of one shape.
class PackedHeads {
  public:
    explicit PackedHeads(std::vector<std::shared_ptr<PackedPanels>> heads) : heads_(std::move(heads)) {
        for (const auto& head : heads_) views_.push_back(head->view());
    }
    const std::vector<Panels>& views() const { return views_; }

  private:
    std::vector<std::shared_ptr<PackedPanels>> heads_;
    std::vector<Panels> views_;
};

// The resident experts of a layer. A call works on the table it found; `set` and `drop` put a new table in its place.
class Bank {
  public:
    using Table = std::vector<std::shared_ptr<const PackedExpert>>;
    Bank(int64_t num_experts, int64_t D) : D_(D), table_(std::make_shared<Table>(num_experts)) {}
    int64_t D() const { return D_; }
    std::shared_ptr<const Table> table() const { return table_; }
    void put(int64_t id, std::shared_ptr<const PackedExpert> expert) {
        auto next = std::make_shared<Table>(*table_);
        next->at(static_cast<size_t>(id)) = std::move(expert);
        table_ = std::move(next);
    }

  private:
    int64_t D_;
    std::shared_ptr<const Table> table_;
};

}  // namespace edge
