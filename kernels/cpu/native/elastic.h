// Which slices of their experts the rows of a step run, from their gate neurons to their masks. Baseline code, used by
// module.cpp only.
#pragma once
#include <vector>

#include "slices.h"
#include "steps.h"

namespace edge {

// Rows that are asked one by one, all experts of a row in one tile; more of them share experts and are sorted by those.
constexpr int64_t FEW_ROWS = 16;

// `call` without activations: they are made here of `neurons`, one small expert of N * r neurons for each expert. Every
// expert that the rows name is there.
inline void choose_by_neurons(const Kernels& kernels, const Bank::Table& neurons, const float* x, int64_t x_stride,
                              SliceCall call) {
    const int64_t T = call.T, K = call.K;
    if (T == 0 || K == 0) return;
    const Expert& any = neurons[call.ids[0]]->view();
    const int64_t F = any.down.num_inputs, padded = (F + 15) / 16 * 16;
    static thread_local std::vector<float> activations;
    activations.resize(static_cast<size_t>(T * K * padded));
    call.activations = activations.data();
    call.stride = padded;
    call.r = F / call.N;
    bool is_alike = T <= FEW_ROWS;
    static thread_local std::vector<const Expert*> experts;
    experts.resize(static_cast<size_t>(K));
    for (int64_t t = 0; t < T && is_alike; ++t) {
        for (int64_t j = 0; j < K; ++j) {
            experts[j] = &neurons[call.ids[t * K + j]]->view();
            is_alike = is_alike && experts[j]->gate_up.format == any.gate_up.format;
        }
        if (is_alike) kernels.neurons_of_row(experts.data(), K, x + t * x_stride, activations.data() + t * K * padded);
    }
    if (!is_alike) {
        static thread_local std::vector<int32_t> rows;
        rows.resize(static_cast<size_t>(T * K));
        for (int64_t i = 0; i < T * K; ++i) rows[i] = static_cast<int32_t>(i / K);
        kernels.expert_inner(sorted_call(neurons, x, x_stride, rows.data(), call.ids, T * K, activations.data(), padded,
                                         nullptr, 1));
    }
    choose_slices(call);
}

}  // namespace edge
