// What single operations and segments share besides the kernels: keys and values into their pages, rows sorted by expert.
// Baseline code, used by module.cpp only.
#pragma once
#include <cstring>
#include <vector>

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

// out[i] = expert ids[i] of row rows[i] of x. All of them resident, all rows there.
inline void run_experts(const Kernels& kernels, const Bank::Table& table, const float* x, int64_t x_stride,
                        const int32_t* rows, const int32_t* ids, int64_t R, float* out, int64_t out_stride) {
    static thread_local std::vector<int64_t> next, offsets;
    static thread_local std::vector<int32_t> sorted;
    static thread_local std::vector<const Expert*> experts;
    const int64_t E = static_cast<int64_t>(table.size());
    next.assign(E + 1, 0);
    sorted.resize(2 * R);
    offsets.clear();
    experts.clear();
    for (int64_t i = 0; i < R; ++i) ++next[ids[i] + 1];
    for (int64_t e = 0; e < E; ++e) {
        if (next[e + 1] > 0) {
            offsets.push_back(next[e]);
            experts.push_back(&table[e]->view());
        }
        next[e + 1] += next[e];
    }
    offsets.push_back(R);
    for (int64_t i = 0; i < R; ++i) {  // stable: an expert meets its rows in the order given
        const int64_t place = next[ids[i]]++;
        sorted[place] = rows[i];
        sorted[R + place] = static_cast<int32_t>(i);
    }
    experts_in_parts(kernels, {x, x_stride, sorted.data(), sorted.data() + R, offsets.data(), experts.data(),
                               static_cast<int64_t>(experts.size()), out, out_stride});
}

}  // namespace edge
