// What single operations and segments share besides the kernels: keys and values into their pages, rows sorted by expert.
// Baseline code, used by module.cpp only.
#pragma once
#include <cstring>
#include <vector>

#include "call.h"
#include "packed.h"
#include "parts.h"
#include "table.h"

namespace edge {

inline void write_kv(const KvPages& pages, const float* k, int64_t k_stride, int64_t k_head_stride, const float* v,
                     int64_t v_stride, int64_t v_head_stride, const int32_t* slots, int64_t T) {
    const int64_t G = pages.G, P = pages.P, Pv = pages.Pv;
    for (int64_t t = 0; t < T; ++t) {
        const int64_t block = slots[t] / 16, offset = slots[t] % 16;
        for (int64_t g = 0; g < G; ++g) {
            const float* from = k + t * k_stride + g * k_head_stride;
            float* to = pages.k + (block * G + g) * P * 16 + offset;
            for (int64_t p = 0; p < P; ++p) to[p * 16] = from[p];
            std::memcpy(pages.v + ((block * G + g) * 16 + offset) * Pv, v + t * v_stride + g * v_head_stride,
                        static_cast<size_t>(Pv) * sizeof(float));
        }
    }
}

inline void check_resident(const Bank::Table& table, const int32_t* ids, int64_t R) {
    const int64_t E = static_cast<int64_t>(table.size());
    for (int64_t i = 0; i < R; ++i)
        if (ids[i] < 0 || ids[i] >= E || !table[ids[i]])
            throw py::index_error("expert_ids: entry " + text(i) + " asks for expert " + text(ids[i]) +
                                  ", which is not resident in this bank of " + text(E));
}

// Routed rows sorted by expert; with masks, those that want all slices before the others. All experts are resident.
inline ExpertCall sorted_call(const Bank::Table& table, const float* x, int64_t x_stride, const int32_t* rows,
                              const int32_t* ids, int64_t R, float* out, int64_t out_stride, const int32_t* masks,
                              int64_t parts) {
    static thread_local std::vector<int64_t> next, offsets;
    static thread_local std::vector<int32_t> sorted;
    static thread_local std::vector<const Expert*> experts;
    const int64_t E = static_cast<int64_t>(table.size()), kinds = masks ? 2 : 1, full = (1 << parts) - 1;
    const auto key = [&](int64_t i) { return kinds * ids[i] + (masks && masks[i] != full); };
    next.assign(kinds * E + 1, 0);
    sorted.resize(3 * R);
    offsets.clear();
    experts.clear();
    for (int64_t i = 0; i < R; ++i) ++next[key(i) + 1];
    for (int64_t e = 0; e < kinds * E; ++e) {
        if (next[e + 1] > 0) {
            offsets.push_back(next[e]);
            experts.push_back(&table[e / kinds]->view());
        }
        next[e + 1] += next[e];
    }
    offsets.push_back(R);
    for (int64_t i = 0; i < R; ++i) {  // stable: an expert meets its rows in the order given
        const int64_t place = next[key(i)]++;
        sorted[place] = rows[i];
        sorted[R + place] = static_cast<int32_t>(i);
        if (masks) sorted[2 * R + place] = masks[i];
    }
    return {x, x_stride, sorted.data(), sorted.data() + R, offsets.data(), experts.data(),
            static_cast<int64_t>(experts.size()), out, out_stride, masks ? sorted.data() + 2 * R : nullptr, parts};
}

// out[i] = expert ids[i] of row rows[i] of x, or the slices of it that masks[i] names. All rows are there.
inline void run_experts(const Kernels& kernels, const Bank::Table& table, const float* x, int64_t x_stride,
                        const int32_t* rows, const int32_t* ids, int64_t R, float* out, int64_t out_stride,
                        const int32_t* masks = nullptr, int64_t parts = 1) {
    experts_in_parts(kernels, sorted_call(table, x, x_stride, rows, ids, R, out, out_stride, masks, parts));
}

// hidden [T, D] += the weighted sum of experts ids [T, K], or of their slices; out [T * K, D] gets what each gave. Returns
// whether hidden is finite afterwards.
inline bool run_and_combine(const Kernels& kernels, const Bank::Table& table, const float* x, int64_t x_stride,
                            const int32_t* ids, const float* weights, int64_t T, int64_t K, int64_t D, float* hidden,
                            int64_t hidden_stride, float* out, int64_t out_stride, const int32_t* masks = nullptr,
                            int64_t parts = 1) {
    static thread_local std::vector<int32_t> rows, slots;
    const int64_t R = T * K;
    rows.resize(static_cast<size_t>(R));
    slots.resize(static_cast<size_t>(R));
    for (int64_t i = 0; i < R; ++i) {
        rows[i] = static_cast<int32_t>(i / K);
        slots[i] = static_cast<int32_t>(i);
    }
    run_experts(kernels, table, x, x_stride, rows.data(), ids, R, out, out_stride, masks, parts);
    kernels.combine(out, out_stride, slots.data(), weights, T, K, D, hidden, hidden_stride);
    return kernels.finite(hidden, hidden_stride, T, D);
}

}  // namespace edge
