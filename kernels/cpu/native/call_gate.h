// The call that chooses experts. Used by module.cpp only.
#pragma once
#include "call.h"

namespace edge {

// The fields of kernels.reference.gate_topk.GateRule, in order.
inline bool read_rule(py::handle rule_, int64_t E, GateCall& call) {
    if (!PyTuple_Check(rule_.ptr()) || PyTuple_GET_SIZE(rule_.ptr()) != 7) return false;
    const auto item = [&](int i) { return py::handle(PyTuple_GET_ITEM(rule_.ptr(), i)); };
    static const char* const NAMES[] = {"softmax", "softmax_of_top_k", "sigmoid"};
    call.scores = -1;
    if (!PyUnicode_Check(item(1).ptr())) return false;
    for (int i = 0; i < 3; ++i)
        if (PyUnicode_CompareWithASCIIString(item(1).ptr(), NAMES[i]) == 0) call.scores = i;
    call.renormalise = item(0).cast<bool>();
    call.num_groups = item(2).cast<int64_t>();
    call.top_groups = item(3).cast<int64_t>();
    call.scale = item(4).cast<float>();
    Argument expert_scale, selection_bias;
    if (!read_vector(item(5), expert_scale, E) || !read_vector(item(6), selection_bias, E)) return false;
    call.expert_scale = expert_scale.floats();
    call.selection_bias = selection_bias.floats();
    return call.scores >= 0 && call.num_groups >= 1 && E % call.num_groups == 0 && call.top_groups >= 1 &&
           call.top_groups <= call.num_groups && call.k >= 1 && call.k <= E / call.num_groups * call.top_groups;
}

// Counts that fit, with blocks that exist, or no counts at all.
inline bool read_counts(py::handle counts_, py::handle slots_, py::handle counted_, GateCall& call) {
    call.counts = nullptr;
    if (counts_.is_none()) return counted_.is_none();
    Argument counts, slots, counted;
    if (!read(counts_, counts) || !read(slots_, slots) || !read(counted_, counted) || counts.ndim != 2 ||
        counts.shape[1] != call.E || (call.E > 1 && counts.strides[1] != 1) ||
        (counts.item != SIGNED_BYTE && counts.item != INT32) || !slots.is_dense(INT32, 1) || slots.shape[0] != call.T ||
        !counted.is_dense(INT32, 1) || counted.shape[0] != call.T)
        return false;
    check_range("slots", slots.ints(), call.T, -1, counts.shape[0] * 16);
    call.counts = counts.data;
    call.counts_are_int8 = counts.item == SIGNED_BYTE;
    call.counts_stride = counts.strides[0] * (call.counts_are_int8 ? 1 : 4);
    call.slots = slots.ints();
    call.counted = counted.ints();
    return true;
}

// The fields of kernels.reference.gate_topk.Counting, in order, or None.
inline bool read_counting(py::handle counting, GateCall& call) {
    if (counting.is_none()) return read_counts(py::none(), py::none(), py::none(), call);
    if (!PyTuple_Check(counting.ptr()) || PyTuple_GET_SIZE(counting.ptr()) != 3) return false;
    const auto item = [&](int i) { return py::handle(PyTuple_GET_ITEM(counting.ptr(), i)); };
    return !item(0).is_none() && read_counts(item(0), item(1), item(2), call);
}

inline bool call_gate_topk(py::handle logits_, int64_t k, py::handle rule, py::handle counting, py::handle ids_,
                    py::handle weights_) {
    Argument logits, ids, weights;
    if (!read(logits_, logits) || !read(ids_, ids) || !read(weights_, weights) || logits.ndim != 2) return false;
    const int64_t T = logits.shape[0], E = logits.shape[1];
    if (!logits.is_rows(E) || !ids.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) || ids.shape[0] != T ||
        ids.shape[1] != k || weights.shape[0] != T || weights.shape[1] != k)
        return false;
    GateCall call{};
    call.logits = logits.floats();
    call.stride = logits.strides[0];
    call.T = T;
    call.E = E;
    call.k = k;
    call.ids = ids.ints();
    call.weights = weights.floats();
    if (!read_rule(rule, E, call) || !read_counting(counting, call)) return false;
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    kernels().gate_topk(call);
    return true;
}

}  // namespace edge
