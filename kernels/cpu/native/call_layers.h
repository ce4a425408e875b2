// The call that runs layers one after another. Used by module.cpp only.
#pragma once
#include "call_experts.h"
#include "call_segment.h"
#include "layers.h"

namespace edge {

struct LayerRun {
    std::vector<RunLayer> layers;
    int64_t most_columns = 0;  // experts per token, at most
    int64_t most_experts = 0;  // scores of a gate, at most
    bool is_counted = false;
};

// Takes a dict for each layer: attention, experts, neurons, slopes, offsets, counts; None for what is not there. The caller has
// checked the shapes and keeps the tensors: kernels/layer_runs.py.
inline LayerRun new_layer_run(const std::vector<py::dict>& given) {
    LayerRun run;
    const auto pointer = [](py::object tensor) -> float* {
        Argument found;
        if (!read(tensor, found) || found.item != FLOAT32) throw py::value_error("slopes, offsets: not float32");
        return found.floats();
    };
    for (const py::dict& each : given) {
        RunLayer layer;
        layer.attention = each["attention"].cast<std::shared_ptr<AttentionSegment>>();
        layer.experts = each["experts"].cast<std::shared_ptr<Bank>>();
        if (!each["neurons"].is_none()) {
            layer.neurons = each["neurons"].cast<std::shared_ptr<Bank>>();
            layer.slopes = pointer(each["slopes"]);
            layer.offsets = pointer(each["offsets"]);
            layer.N = each["num_parts"].cast<int64_t>();
        }
        Argument counts;
        if (!each["counts"].is_none()) {
            if (!read(each["counts"], counts) || (counts.item != SIGNED_BYTE && counts.item != INT32))
                throw py::value_error("counts: neither int8 nor int32");
            layer.counts = counts.data;
            layer.counts_are_int8 = counts.item == SIGNED_BYTE;
            layer.counts_stride = counts.strides[0] * (layer.counts_are_int8 ? 1 : 4);
            run.is_counted = true;
        }
        const AttentionSegment& s = *layer.attention;
        if (s.gate) {
            run.most_columns = std::max(run.most_columns, s.rule.k);
            run.most_experts = std::max(run.most_experts, s.rule.E);
        }
        run.layers.push_back(std::move(layer));
    }
    return run;
}

// Returns (first layer after which hidden is not finite or -1, seconds of attention, seconds of experts), or None if an
// argument does not fit.
inline py::object call_run_layers(const LayerRun& run, py::handle hidden, py::handle x, py::handle positions,
                                  py::handle slots, py::handle row_request, py::handle block_tables, py::handle buffer,
                                  py::handle logits_, py::handle ids_, py::handle weights_, py::handle expert_out_,
                                  py::handle dense_out_, py::handle counted_, py::handle tiers_, py::handle masks_,
                                  py::handle dropped_) {
    if (run.layers.empty()) return py::none();
    const int64_t L = static_cast<int64_t>(run.layers.size()), D = run.layers[0].attention->D;
    SegmentRows rows;
    int64_t num_requests;
    for (const RunLayer& layer : run.layers)
        if (!read_segment_rows(*layer.attention, hidden, x, positions, slots, row_request, block_tables, buffer, rows,
                               num_requests))
            return py::none();
    const int64_t T = rows.T, K = run.most_columns;
    Argument logits, ids, weights, expert_out, dense_out, counted, tiers, masks, dropped;
    if (K > 0 && (!read(logits_, logits) || !read(ids_, ids) || !read(weights_, weights) || !read(expert_out_, expert_out) ||
                  !logits.is_dense(FLOAT32, 2) || logits.shape[0] != T || logits.shape[1] < run.most_experts ||
                  !ids.is_dense(INT32, 3) || ids.shape[0] < L || ids.shape[1] != T || ids.shape[2] != K || !weights.is_dense(FLOAT32, 3) ||
                  weights.shape[0] < L || weights.shape[1] != T || weights.shape[2] != K || !expert_out.is_dense(FLOAT32, 2) ||
                  expert_out.shape[0] != T * K || expert_out.shape[1] != D))
        return py::none();
    for (const RunLayer& layer : run.layers)
        if (layer.attention->gate ? layer.attention->rule.k != K
                                  : !read(dense_out_, dense_out) || !dense_out.is_dense(FLOAT32, 2) ||
                                        dense_out.shape[0] != T || dense_out.shape[1] != D)
            return py::none();
    if (run.is_counted && (!read(counted_, counted) || !counted.is_dense(INT32, 1) || counted.shape[0] != T)) return py::none();
    if (!tiers_.is_none() &&
        (!read(tiers_, tiers) || !read(masks_, masks) || !read(dropped_, dropped) || !tiers.is_dense(INT32, 2) ||
         tiers.shape[0] < L || tiers.shape[1] != T || !masks.is_dense(INT32, 2) || masks.shape[0] != T || masks.shape[1] != K ||
         !dropped.is_dense(FLOAT32, 2) || dropped.shape[0] < L || dropped.shape[1] != T))
        return py::none();
    Tables experts, neurons;
    for (const RunLayer& layer : run.layers) {
        check_segment_rows(*layer.attention, rows, num_requests);
        experts.push_back(layer.experts->table());
        neurons.push_back(layer.neurons ? layer.neurons->table() : nullptr);
        if (!layer.attention->gate) {
            const int32_t only = 0;
            check_resident(*experts.back(), &only, 1);
        }
    }
    rows.logits = logits.floats();
    RunBuffers buffers{K, ids.ints(), weights.floats(), expert_out.floats(), dense_out.floats(), counted.ints(),
                       tiers.ints(), masks.ints(), dropped.floats(), 0.0, 0.0};
    int64_t stopped;
    {
        py::gil_scoped_release release;
        stopped = run_layers(kernels(), run.layers, experts, neurons, rows, buffers);
    }
    return py::make_tuple(stopped, buffers.attention_s, buffers.experts_s);
}

}  // namespace edge
