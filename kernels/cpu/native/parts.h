// Large calls cut into parts, one thread each. Baseline code, used by module.cpp only.
#pragma once
#include <algorithm>
#include <vector>

#include "pool.h"
#include "table.h"

namespace edge {

// Never destroyed: its threads sleep in it until the process ends.
inline Pool& pool() {
    static Pool* const threads = new Pool;
    return *threads;
}

// How many parts to cut work into. Threads that look out for work take a part within a microsecond; sleeping ones need tens,
// so a part has to be worth that. A call too small for it rouses them for those that follow, as a step's do.
inline int64_t parts_worth(int64_t multiply_adds, int64_t bytes, int64_t most) {
    constexpr int64_t LEAST_US = 5, LEAST_ASLEEP_US = 40;
    const int64_t threads = pool().threads();
    if (threads <= 1) return 1;
    const int64_t us = std::max(multiply_adds / 50'000, bytes / 20'000);
    const bool is_awake = pool().is_awake();
    if (!is_awake && us >= LEAST_US && us < 2 * LEAST_ASLEEP_US) pool().rouse();
    return std::max<int64_t>(1, std::min({threads, us / (is_awake ? LEAST_US : LEAST_ASLEEP_US), most}));
}

inline int64_t begin_of(int64_t n, int64_t parts, int64_t part) { return n * part / parts; }

// Parts are panels: the rows are the same for all, each weight is read by one thread.
inline void linear_in_parts(const Kernels& kernels, const Panels& w, const float* x, int64_t x_stride, int64_t T,
                            const float* bias, float* out, int64_t out_stride, bool add) {
    const int64_t panels = (w.num_outputs + 15) / 16;
    const int64_t parts = parts_worth(T * w.num_outputs * w.num_inputs, panels * w.panel_bytes, panels / 8);
    pool().run(parts, [&](int64_t part) {
        const int64_t p0 = begin_of(panels, parts, part), p1 = begin_of(panels, parts, part + 1);
        Panels mine = w;
        mine.data += p0 * w.panel_bytes;
        mine.num_outputs = std::min(16 * p1, w.num_outputs) - 16 * p0;
        kernels.linear(mine, x, x_stride, T, bias ? bias + 16 * p0 : nullptr, out + 16 * p0, out_stride, add);
    });
}

// Parts are runs of heads, each with its own weight.
inline void heads_in_parts(const Kernels& kernels, const std::vector<Panels>& heads, const float* x, int64_t x_stride,
                           int64_t x_head_stride, int64_t T, float* out, int64_t out_stride, int64_t out_head_stride) {
    const int64_t H = static_cast<int64_t>(heads.size());
    const Panels& first = heads[0];
    const int64_t parts = parts_worth(T * H * first.num_outputs * first.num_inputs,
                                      H * (first.num_outputs + 15) / 16 * first.panel_bytes, H);
    pool().run(parts, [&](int64_t part) {
        for (int64_t h = begin_of(H, parts, part); h < begin_of(H, parts, part + 1); ++h)
            kernels.linear(heads[h], x + h * x_head_stride, x_stride, T, nullptr, out + h * out_head_stride, out_stride,
                           false);
    });
}

inline int64_t seen_by(const AttentionCall& call, int64_t t) {
    const int64_t length = call.row_position[t] + 1;
    return call.window > 0 ? std::min(length, call.window) : length;
}

// Parts are runs of rows.
inline void attention_in_parts(const Kernels& kernels, const AttentionCall& call) {
    int64_t seen = 0;
    for (int64_t t = 0; t < call.T; ++t) seen += seen_by(call, t);
    const int64_t parts = parts_worth(seen * call.H * (call.pages.P + call.pages.Pv), 0, call.T);
    pool().run(parts, [&](int64_t part) {
        const int64_t t0 = begin_of(call.T, parts, part);
        AttentionCall mine = call;
        mine.q += t0 * call.q_stride;
        mine.row_request += t0;
        mine.row_position += t0;
        if (call.bias) mine.own_position += t0;
        mine.out += t0 * call.out_stride;
        mine.T = begin_of(call.T, parts, part + 1) - t0;
        kernels.paged_attention(mine);
    });
}

// Parts are runs of experts, more parts than threads since experts have unequal rows.
inline void experts_in_parts(const Kernels& kernels, const ExpertCall& call) {
    if (call.groups == 0) return;
    const Expert& first = *call.experts[0];
    const int64_t values = first.gate_up.num_outputs * first.gate_up.num_inputs * 3 / 2;
    const int64_t rows = call.offsets[call.groups] - call.offsets[0];
    const int64_t worth = parts_worth(rows * values, 2 * call.groups * values, call.groups);
    const int64_t parts = worth > 1 ? std::min(4 * worth, call.groups) : 1;
    pool().run(parts, [&](int64_t part) {
        const int64_t g0 = begin_of(call.groups, parts, part);
        ExpertCall mine = call;
        mine.offsets += g0;
        mine.experts += g0;
        mine.groups = begin_of(call.groups, parts, part + 1) - g0;
        kernels.grouped_ffn(mine);
    });
}

}  // namespace edge
