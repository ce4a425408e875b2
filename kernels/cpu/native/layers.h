// Layers one after another in one call: attention segments and the experts between them, where all experts are here. Made of
// the very routines that the single calls run. Baseline code, used by module.cpp only.
#pragma once
#include <chrono>
#include <memory>
#include <vector>

#include "elastic.h"
#include "segments.h"
#include "steps.h"

namespace edge {

// One layer: attention, then experts that its gate chooses or, without a gate, the one that all rows pass.
struct RunLayer {
    std::shared_ptr<AttentionSegment> attention;
    std::shared_ptr<Bank> experts;
    std::shared_ptr<Bank> neurons;  // of its gate over slices; null where experts are whole
    const float *slopes = nullptr, *offsets = nullptr;  // [E, N]
    int64_t N = 1;
    char* counts = nullptr;  // where chosen experts are counted by block, or null
    int64_t counts_stride = 0;
    bool counts_are_int8 = false;
};

struct RunBuffers {
    int64_t K;             // columns of ids and weights
    int32_t* ids;          // [layers, T, K]
    float* weights;        // [layers, T, K]
    float* expert_out;     // [T * K, D]
    float* dense_out;      // [T, D]
    const int32_t* counted;  // [T] or null
    const int32_t* tiers;    // [layers, T] slices of each row, or null: all run everything
    int32_t* masks;          // [T, K]
    float* dropped;          // [layers, T]
    double attention_s, experts_s;
};

using Tables = std::vector<std::shared_ptr<const Bank::Table>>;

// Returns the first layer after which hidden is not finite, counted from 0, or -1.
inline int64_t run_layers(const Kernels& kernels, const std::vector<RunLayer>& layers, const Tables& experts,
                          const Tables& neurons, const SegmentRows& rows, RunBuffers& b) {
    using Clock = std::chrono::steady_clock;
    const int64_t T = rows.T;
    static thread_local std::vector<int32_t> zeros, counting;
    zeros.assign(static_cast<size_t>(T), 0);
    counting.resize(static_cast<size_t>(T));
    for (int64_t t = 0; t < T; ++t) counting[t] = static_cast<int32_t>(t);
    for (size_t i = 0; i < layers.size(); ++i) {
        const RunLayer& layer = layers[i];
        const AttentionSegment& s = *layer.attention;
        const int64_t D = s.D, K = s.gate ? s.rule.k : 0;
        const auto began = Clock::now();
        float* weights = b.weights + int64_t(i) * T * b.K;
        int32_t* ids = b.ids + int64_t(i) * T * b.K;
        GateCall gate = s.rule;
        gate.T = T;
        gate.ids = ids;
        gate.weights = weights;
        gate.counts = layer.counts;
        gate.counts_stride = layer.counts_stride;
        gate.counts_are_int8 = layer.counts_are_int8;
        gate.slots = rows.slots;
        gate.counted = b.counted;
        run_attention_segment(kernels, s, rows, gate);
        const auto attended = Clock::now();
        bool is_finite = true;
        if (s.gate) {
            check_resident(*experts[i], ids, T * K);
            const int32_t* masks = nullptr;
            if (b.tiers && layer.neurons) {
                check_resident(*neurons[i], ids, T * K);
                choose_by_neurons(kernels, *neurons[i], rows.x, rows.x_stride,
                                  {nullptr, 0, 0, ids, weights, layer.slopes, layer.offsets, T, K, layer.N, b.tiers + int64_t(i) * T,
                                   b.masks, b.dropped + int64_t(i) * T});
                masks = b.masks;
            }
            is_finite = run_and_combine(kernels, *experts[i], rows.x, rows.x_stride, ids, weights, T, K, D, rows.hidden,
                                        rows.hidden_stride, b.expert_out, D, masks, layer.N);
        } else {
            run_experts(kernels, *experts[i], rows.x, rows.x_stride, counting.data(), zeros.data(), T, b.dense_out, D);
            for (int64_t t = 0; t < T; ++t)
                for (int64_t d = 0; d < D; ++d) rows.hidden[t * rows.hidden_stride + d] += b.dense_out[t * D + d];
        }
        b.attention_s += std::chrono::duration<double>(attended - began).count();
        b.experts_s += std::chrono::duration<double>(Clock::now() - attended).count();
        if (!is_finite) return static_cast<int64_t>(i);
    }
    return -1;
}

}  // namespace edge
