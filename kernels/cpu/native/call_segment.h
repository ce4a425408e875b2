// The call that runs attention and gate of a layer. Used by module.cpp only.
#pragma once
#include "call_attention.h"
#include "call_gate.h"
#include "segments.h"

namespace edge {

// Reads what AttentionSegment points to. The caller has checked the shapes: kernels/segments.py.
inline std::shared_ptr<AttentionSegment> new_attention_segment(py::dict given) {
    auto segment = std::make_shared<AttentionSegment>();
    AttentionSegment& s = *segment;
    const auto floats = [&](const char* name) -> float* {
        Argument tensor;
        const py::object object = given[name];
        if (object.is_none()) return nullptr;
        if (!read(object, tensor) || tensor.item != FLOAT32) throw py::value_error(std::string(name) + ": not float32");
        return tensor.floats();
    };
    s.D = given["D"].cast<int64_t>();
    s.H = given["H"].cast<int64_t>();
    s.G = given["G"].cast<int64_t>();
    s.P = given["P"].cast<int64_t>();
    s.eps = given["eps"].cast<float>();
    s.input_norm = floats("input_norm");
    s.qkv = given["qkv"].cast<std::shared_ptr<PackedPanels>>();
    s.qkv_bias = floats("qkv_bias");
    s.q_norm = floats("q_norm");
    s.k_norm = floats("k_norm");
    s.norms_whole = given["norms_whole"].cast<bool>();
    s.cos = floats("cos");
    s.sin = floats("sin");
    s.S = given["S"].cast<int64_t>();
    s.C = given["C"].cast<int64_t>();
    s.interleaved = given["interleaved"].cast<bool>();
    if (!read_pages(given["k_pages"], given["v_pages"], s.pages)) throw py::value_error("k_pages, v_pages: do not fit");
    s.scale = given["scale"].cast<float>();
    s.window = given["window"].is_none() ? 0 : given["window"].cast<int64_t>();
    s.sinks = floats("sinks");
    s.soft_cap = given["soft_cap"].is_none() ? 0.0f : given["soft_cap"].cast<float>();
    s.out = given["out"].cast<std::shared_ptr<PackedPanels>>();
    s.out_bias = floats("out_bias");
    s.post_norm = floats("post_norm");
    if (!given["gate"].is_none()) {
        s.gate = given["gate"].cast<std::shared_ptr<PackedPanels>>();
        s.gate_bias = floats("gate_bias");
        s.rule.E = s.gate->view().num_outputs;
        s.rule.k = given["top_k"].cast<int64_t>();
        if (!read_rule(given["rule"], s.rule.E, s.rule)) throw py::value_error("rule: does not fit the gate");
    }
    return segment;
}

// Where the rows of a step stand and what they are computed in; false if an argument does not fit.
inline bool read_segment_rows(const AttentionSegment& s, py::handle hidden_, py::handle x_, py::handle positions_,
                              py::handle slots_, py::handle row_request_, py::handle block_tables_, py::handle buffer_,
                              SegmentRows& rows, int64_t& num_requests) {
    Argument hidden, x, positions, slots, row_request, tables, buffer;
    if (!read(hidden_, hidden) || !read(x_, x) || !read(positions_, positions) || !read(slots_, slots) ||
        !read(row_request_, row_request) || !read(block_tables_, tables) || !read(buffer_, buffer) || !hidden.is_rows(s.D) || !x.is_rows(s.D))
        return false;
    const int64_t T = hidden.shape[0];
    if (x.shape[0] != T || !tables.is_dense(INT32, 2) || !buffer.is_dense(FLOAT32, 1) ||
        buffer.shape[0] < T * 2 * (s.H + s.G) * s.P)
        return false;
    for (const Argument* indices : {&positions, &slots, &row_request})
        if (!indices->is_dense(INT32, 1) || indices->shape[0] != T) return false;
    rows = {T, hidden.floats(), x.floats(), hidden.strides[0], x.strides[0], positions.ints(), slots.ints(),
            row_request.ints(), tables.ints(), tables.shape[1], buffer.floats(), nullptr};
    num_requests = tables.shape[0];
    return true;
}

// The error for rows that point nowhere.
inline void check_segment_rows(const AttentionSegment& s, const SegmentRows& rows, int64_t num_requests) {
    check_range("positions", rows.positions, rows.T, 0, std::min(s.S, rows.M * 16));
    check_range("slots", rows.slots, rows.T, 0, s.pages.num_blocks * 16);
    check_range("row_request", rows.row_request, rows.T, 0, num_requests);
    AttentionCall seen{};
    seen.pages = s.pages;
    seen.block_tables = rows.block_tables;
    seen.M = rows.M;
    seen.row_request = rows.row_request;
    seen.row_position = rows.positions;
    seen.T = rows.T;
    seen.window = s.window;
    check_tables(seen);
}

// False if an argument does not fit.
inline bool call_attention_segment(const AttentionSegment& s, py::handle hidden, py::handle x, py::handle positions,
                            py::handle slots, py::handle row_request, py::handle block_tables, py::handle buffer,
                            py::handle logits_, py::handle ids_, py::handle weights_, py::handle counts,
                            py::handle counted) {
    SegmentRows rows;
    int64_t num_requests;
    if (!read_segment_rows(s, hidden, x, positions, slots, row_request, block_tables, buffer, rows, num_requests))
        return false;
    const int64_t T = rows.T;
    GateCall gate = s.rule;
    if (s.gate) {
        Argument logits, ids, weights;
        if (!read(ids_, ids) || !read(weights_, weights) || !read(logits_, logits) || !logits.is_dense(FLOAT32, 2) ||
            logits.shape[0] != T || logits.shape[1] != s.rule.E || !ids.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) ||
            ids.shape[0] != T || ids.shape[1] != s.rule.k || weights.shape[0] != T || weights.shape[1] != s.rule.k)
            return false;
        gate.T = T;
        gate.ids = ids.ints();
        gate.weights = weights.floats();
        rows.logits = logits.floats();
        if (!read_counts(counts, slots, counted, gate)) return false;
    }
    check_segment_rows(s, rows, num_requests);
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    run_attention_segment(kernels(), s, rows, gate);
    return true;
}

}  // namespace edge
