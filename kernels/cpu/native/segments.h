// Parts of a layer as one call each, made of the very routines of the single operations. Included by module.cpp only.
#pragma once
#include <memory>

#include "arguments.h"
#include "packed.h"
#include "parts.h"
#include "spent.h"
#include "steps.h"
#include "table.h"

namespace edge {

// Everything about one layer's attention and gate that does not change from step to step. The Python side keeps the
// tensors behind the pointers alive and has checked their shapes.
struct AttentionSegment {
    int64_t D = 0, H = 0, G = 0, P = 0;
    float eps = 0;
    const float* input_norm = nullptr;   // [D]
    std::shared_ptr<PackedPanels> qkv;   // [(H + 2 G) P, D]
    const float* qkv_bias = nullptr;
    const float *q_norm = nullptr, *k_norm = nullptr;  // [P], or [H P] and [G P] if `norms_whole`
    bool norms_whole = false;
    const float *cos = nullptr, *sin = nullptr;  // [S, C]
    int64_t S = 0, C = 0;
    bool interleaved = false;
    KvPages pages{};
    float scale = 1;
    int64_t window = 0;
    const float* sinks = nullptr;
    float soft_cap = 0;
    std::shared_ptr<PackedPanels> out;  // [D, H P]
    const float* out_bias = nullptr;
    const float* post_norm = nullptr;  // [D]
    std::shared_ptr<PackedPanels> gate;  // [E, D], null in a dense layer
    const float* gate_bias = nullptr;
    GateCall rule{};  // all but what changes from step to step
};

struct SegmentRows {
    int64_t T;
    float *hidden, *x;
    int64_t hidden_stride, x_stride;
    const int32_t *positions, *slots, *row_request, *block_tables;
    int64_t M;
    float* buffer;  // [T * ((2 H + 2 G) P)]
    float* logits;  // [T, E]
};

// hidden += attention(norm(hidden)); x = norm(hidden); ids and weights of `gate` by x.
inline void run_attention_segment(const Kernels& kernels, const AttentionSegment& s, const SegmentRows& r,
                                  const GateCall& gate) {
    const int64_t T = r.T, q_width = s.H * s.P, k_width = s.G * s.P, wide = q_width + 2 * k_width;
    float *qkv = r.buffer, *mixed = qkv + T * wide;
    float *q = qkv, *k = qkv + q_width, *v = k + k_width;
    kernels.rms_norm(r.hidden, r.hidden_stride, s.input_norm, s.eps, T, s.D, r.x, r.x_stride);
    linear_in_parts(kernels, s.qkv->view(), r.x, r.x_stride, T, s.qkv_bias, qkv, wide, false);
    const float *q_norm = s.q_norm, *k_norm = s.k_norm;
    if (s.norms_whole) {
        kernels.rms_norm(q, wide, q_norm, s.eps, T, q_width, q, wide);
        kernels.rms_norm(k, wide, k_norm, s.eps, T, k_width, k, wide);
        q_norm = k_norm = nullptr;
    }
    kernels.head_norm_rope(q, wide, s.P, T, s.H, s.P, q_norm, s.eps, s.cos, s.sin, s.C, s.interleaved, r.positions);
    kernels.head_norm_rope(k, wide, s.P, T, s.G, s.P, k_norm, s.eps, s.cos, s.sin, s.C, s.interleaved, r.positions);
    write_kv(s.pages, k, wide, s.P, v, wide, s.P, r.slots, T);
    const AttentionCall attention{q,           wide,      s.P,   s.pages, r.block_tables, r.M,     r.row_request,
                                  r.positions, s.scale,   mixed, q_width, s.P,            T,       s.H,
                                  s.window,    s.sinks,   s.soft_cap};
    {
        const Spending spending(ATTENTION, DENSE);
        attention_in_parts(kernels, attention);
    }
    linear_in_parts(kernels, s.out->view(), mixed, q_width, T, s.out_bias, r.hidden, r.hidden_stride, true);
    kernels.rms_norm(r.hidden, r.hidden_stride, s.post_norm, s.eps, T, s.D, r.x, r.x_stride);
    if (!s.gate) return;
    const int64_t E = gate.E;
    linear_in_parts(kernels, s.gate->view(), r.x, r.x_stride, T, s.gate_bias, r.logits, E, false);
    GateCall call = gate;
    call.logits = r.logits;
    call.stride = E;
    kernels.gate_topk(call);
}

}  // namespace edge
