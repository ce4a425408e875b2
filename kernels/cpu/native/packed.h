// Packed weights in memory of their own: the only copy. Knows nothing of Python and nothing of instruction sets.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "table.h"

namespace edge {

struct Free {
    size_t mapped = 0;  // bytes, if they came from the system and not from the allocator
    void operator()(char* p) const {
#if defined(__linux__)
        if (mapped > 0) {
            munmap(p, mapped);
            return;
        }
#endif
        std::free(p);
    }
};

// Large ones on huge pages: a step reads all weights once, and walks of the page table are a good part of that. They begin
// on a whole huge page and end where they end, so that no byte more is resident.
inline std::unique_ptr<char, Free> aligned_bytes(size_t bytes) {
#if defined(__linux__)
    constexpr size_t HUGE_PAGE = size_t(2) << 20, PAGE = 4096;
    if (bytes >= HUGE_PAGE) {
        const size_t size = (bytes + PAGE - 1) / PAGE * PAGE, reserved = size + HUGE_PAGE;
        void* found = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
        char* const base = static_cast<char*>(found);
        const size_t before = (HUGE_PAGE - reinterpret_cast<uintptr_t>(base) % HUGE_PAGE) % HUGE_PAGE;
        if (before > 0) munmap(base, before);
        munmap(base + before + size, HUGE_PAGE - before);
        madvise(base + before, size / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
        return std::unique_ptr<char, Free>(base + before, Free{size});
    }
#endif
    void* p = nullptr;
    if (posix_memalign(&p, 64, bytes ? bytes : 64) != 0) throw std::bad_alloc();
    return std::unique_ptr<char, Free>(static_cast<char*>(p));
}

// A weight [N, K] in panels of 16 outputs, layout as in table.h. Built empty, filled row by row, then never changed.
class PackedPanels {
  public:
    PackedPanels(int64_t N, int64_t K, int format) {
        view_.format = format;
        view_.num_outputs = N;
        view_.num_inputs = K;
        view_.panel_bytes = panel_bytes(K, format);
        nbytes_ = (N + 15) / 16 * view_.panel_bytes;
        bytes_ = aligned_bytes(static_cast<size_t>(nbytes_));
        std::memset(bytes_.get(), 0, static_cast<size_t>(nbytes_));
        view_.data = bytes_.get();
    }

    const Panels& view() const { return view_; }
    int64_t nbytes() const { return nbytes_; }

    // Floats [count, K] of the format's own type.
    void fill(int64_t first, const void* rows, int64_t count) {
        const auto as_it_is = [](auto value) { return value; };
        if (view_.format == F32)
            fill_as(first, static_cast<const uint32_t*>(rows), count, view_.num_inputs, as_it_is);
        else
            fill_as(first, static_cast<const uint16_t*>(rows), count, view_.num_inputs, as_it_is);
    }

    // int8: codes [count, K] and float32 scales [count]. int4, mxfp4: nibbles uint8 [count, groups, 16], input 2i in the
    // low half of byte i, and scales [count, groups], float16 or one byte of exponent.
    void fill_codes(int64_t first, const void* codes, const void* scales, int64_t count) {
        if (view_.format == Q8)
            fill_as(first, static_cast<const uint8_t*>(codes), count, view_.num_inputs,
                    [](uint8_t code) { return static_cast<uint8_t>(code ^ 0x80); });
        else
            fill_as(first, static_cast<const uint32_t*>(codes), count, 4 * groups(),
                    [flip = view_.format == Q4 ? 0x88888888u : 0u](uint32_t pairs) { return part_halves(pairs) ^ flip; });
        const int64_t per_row = view_.format == Q8 ? 1 : groups(), size = scale_bytes();
        for (int64_t n = 0; n < count; ++n)
            for (int64_t g = 0; g < per_row; ++g)
                std::memcpy(bytes_.get() + scale_at(first + n, g),
                            static_cast<const char*>(scales) + (n * per_row + g) * size, static_cast<size_t>(size));
    }

    // The call that makes codes of float rows, stored as `stored` says and `stride` elements apart, into rows `first` and on.
    QuantiseCall quantising(int64_t first, const void* rows, int stored, int64_t stride, int64_t count) {
        return {rows, stored, stride, count, view_.num_inputs, view_.format, bytes_.get(), view_.panel_bytes, first};
    }

    void widen_row(int64_t n, float* out) const {
        for (int64_t k = 0; k < view_.num_inputs; ++k) out[k] = value(n, k);
    }

  private:
    static int64_t panel_bytes(int64_t K, int format) {
        const int64_t groups = (K + GROUP - 1) / GROUP;
        switch (format) {
            case F32: return (K + K % 2) * 64;
            case Q8: return 64 + (K + 3) / 4 * 64;
            case Q4: return groups * GROUP_BYTES + (groups + 1) / 2 * 64;
            case MXFP4: return groups * GROUP_BYTES + (groups + 3) / 4 * 64;
            default: return (K + K % 2) * 32;
        }
    }

    int64_t groups() const { return (view_.num_inputs + GROUP - 1) / GROUP; }
    int64_t scale_bytes() const { return view_.format == Q8 ? 4 : view_.format == Q4 ? 2 : 1; }
    int64_t groups_per_line() const { return view_.format == Q4 ? 2 : 4; }

    int64_t panel_at(int64_t n) const { return n / 16 * view_.panel_bytes; }

    // Byte of a panel where column k of its first row lies; in int4 and mxfp4 dword k, which is eight columns.
    int64_t column(int64_t k) const {
        switch (view_.format) {
            case BF16:
            case BF16X2: return k / 2 * 64 + k % 2 * 2;
            case F16: return k * 32;
            case F32: return k * 64;
            case Q8: return 64 + k / 4 * 64 + k % 4;
            default: return (k / 4 / groups_per_line() + 1) * 64 + k * 64;
        }
    }
    int64_t lane_bytes() const { return view_.format == F16 ? 2 : 4; }
    int64_t place(int64_t n, int64_t k) const { return panel_at(n) + column(k) + n % 16 * lane_bytes(); }

    int64_t scale_at(int64_t n, int64_t g) const {
        if (view_.format == Q8) return panel_at(n) + n % 16 * 4;
        const int64_t most = groups_per_line();
        return panel_at(n) + g / most * (64 + most * GROUP_BYTES) + (g % most * 16 + n % 16) * scale_bytes();
    }

    // Of eight inputs in neighbouring halves: the first four into the low halves of the bytes, the others into the high ones.
    static uint32_t part_halves(uint32_t pairs) {
        uint32_t parted = 0;
        for (int k = 0; k < 8; ++k) parted |= (pairs >> (4 * k) & 15) << (k % 4 * 8 + k / 4 * 4);
        return parted;
    }

    template <class Item, class Change>
    void fill_as(int64_t first, const Item* rows, int64_t count, int64_t columns, const Change& change) {
        const int64_t step = lane_bytes();
        for (int64_t begin = 0; begin < count;) {  // panel by panel: writes stay in a few lines of cache
            const int64_t lane = (first + begin) % 16, end = begin + std::min<int64_t>(16 - lane, count - begin);
            char* panel = bytes_.get() + panel_at(first + begin) + lane * step;
            for (int64_t k = 0; k < columns; ++k) {
                char* to = panel + column(k);
                for (int64_t n = begin; n < end; ++n) {
                    const Item item = change(rows[n * columns + k]);
                    std::memcpy(to + (n - begin) * step, &item, sizeof item);
                }
            }
            begin = end;
        }
    }

    template <class Item>
    Item item(int64_t at) const {
        Item found;
        std::memcpy(&found, bytes_.get() + at, sizeof found);
        return found;
    }
    static float as_float(uint32_t bits) {
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    float value(int64_t n, int64_t k) const {
        switch (view_.format) {
            case BF16:
            case BF16X2: return as_float(uint32_t(item<uint16_t>(place(n, k))) << 16);
            case F16: return as_float(float16_bits(item<uint16_t>(place(n, k))));
            case F32: return item<float>(place(n, k));
            case Q8: return float(int(item<uint8_t>(place(n, k))) - 128) * item<float>(scale_at(n, 0));
        }
        const uint32_t code = item<uint32_t>(place(n, k / 8)) >> (k % 4 * 8 + k % 8 / 4 * 4) & 15;
        const int64_t scale = scale_at(n, k / GROUP);
        if (view_.format == Q4) return float(int(code) - 8) * as_float(float16_bits(item<uint16_t>(scale)));
        static constexpr float E2M1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        const uint32_t exponent = item<uint8_t>(scale);
        return (code & 8 ? -E2M1[code & 7] : E2M1[code & 7]) * as_float(exponent ? exponent << 23 : 0x00400000u);
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
