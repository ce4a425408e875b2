// kernels.cpu._native: tensors in, work done without the GIL.
//
// Says yes or no to shapes and dtypes; which argument is at fault is for kernels/ops.py to say. What only the values tell
// (ids, slots, positions that point nowhere) is an error from here. Every call_* returns false, having done nothing, when an
// argument does not fit.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "call_attention.h"
#include "call_experts.h"
#include "call_gate.h"
#include "call_layers.h"
#include "call_rows.h"
#include "call_segment.h"
#include "call_slices.h"
#include "call_swaps.h"

namespace edge {

constexpr int INTERFACE = 3;  // as in kernels/interface.py; raised when what Python calls here changes

void* scratch(Scratch which, size_t bytes) {
    struct Buffer {
        std::unique_ptr<char, Free> bytes;
        size_t size = 0;
    };
    static thread_local Buffer buffers[NUM_SCRATCH];
    Buffer& buffer = buffers[which];
    if (buffer.size < bytes) {
        buffer.bytes.reset();
        buffer.size = 0;
        buffer.bytes = aligned_bytes(bytes + bytes / 2);
        buffer.size = bytes + bytes / 2;
    }
    return buffer.bytes.get();
}

void integer_product(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then) {
    serving()->integer_product(w, x, out, T, add, then);
}

}  // namespace edge

PYBIND11_MODULE(_native, m) {
    using namespace edge;
    m.doc() = "Native CPU kernels; see kernels/ops.py for what they mean.";
    m.attr("INTERFACE") = INTERFACE;
    py::class_<PackedPanels, std::shared_ptr<PackedPanels>>(m, "PackedPanels")
        .def(py::init<int64_t, int64_t, int>())
        .def("fill",
             [](PackedPanels& self, int64_t first, Address rows, int64_t count) {
                 py::gil_scoped_release release;
                 self.fill(first, at<void>(rows), count);
             })
        .def("fill_codes",
             [](PackedPanels& self, int64_t first, Address codes, Address scales, int64_t count) {
                 py::gil_scoped_release release;
                 self.fill_codes(first, at<void>(codes), at<void>(scales), count);
             })
        .def("quantise",
             [](PackedPanels& self, int64_t first, Address rows, int stored, int64_t stride, int64_t count) {
                 py::gil_scoped_release release;
                 return kernels().quantise(self.quantising(first, at<void>(rows), stored, stride, count));
             })
        .def_property_readonly("nbytes", &PackedPanels::nbytes);
    py::class_<PackedExpert, std::shared_ptr<PackedExpert>>(m, "PackedExpert")
        .def(py::init<std::shared_ptr<PackedPanels>, std::shared_ptr<PackedPanels>, int, float, float, bool>())
        .def("fill_bias",
             [](PackedExpert& self, int64_t first, Address values, int64_t count) {
                 self.fill_bias(first, at<float>(values), count);
             })
        .def_property_readonly("nbytes", &PackedExpert::nbytes);
    py::class_<AttentionSegment, std::shared_ptr<AttentionSegment>>(m, "AttentionSegment").def(py::init(&new_attention_segment));
    m.def("attention_segment", &call_attention_segment);
    m.def("experts", &call_experts);
    py::class_<PackedHeads>(m, "PackedHeads").def(py::init<std::vector<std::shared_ptr<PackedPanels>>>());
    py::class_<Bank, std::shared_ptr<Bank>>(m, "Bank")
        .def(py::init<int64_t, int64_t>())
        .def("set", [](Bank& self, int64_t id, std::shared_ptr<PackedExpert> expert) { self.put(id, expert); })
        .def("drop", [](Bank& self, int64_t id) { self.put(id, nullptr); });
    py::class_<LayerRun>(m, "LayerRun").def(py::init(&new_layer_run));
    m.def("run_layers", &call_run_layers);
    m.def("find_torch", &find_torch);
    m.def("set_num_threads", [](int threads) {
        py::gil_scoped_release release;
        pool().resize(threads);
    });
    m.def("num_threads", [] { return pool().threads(); });
    m.def("isa", [] { return std::string(serving()->name); });
    m.def("runnable_isas", &runnable_isas);
    m.def("use_isa", [](const std::string& isa) { serving() = find_isa(isa); });
    m.def("spent", [] {  // seconds in dense products and rows, in attention, in experts
        return py::make_tuple(1e-9 * static_cast<double>(spent_ns(DENSE)), 1e-9 * static_cast<double>(spent_ns(ATTENTION)),
                              1e-9 * static_cast<double>(spent_ns(EXPERTS)));
    });
    m.def("linear", &call_linear);
    m.def("embed", &call_embed);
    m.def("rms_norm", &call_rms_norm);
    m.def("head_norm_rope", &call_head_norm_rope);
    m.def("kv_write", &call_kv_write);
    m.def("paged_attention", &call_paged_attention);
    m.def("biased_attention", &call_biased_attention);
    m.def("gate_topk", &call_gate_topk);
    m.def("grouped_ffn", &call_grouped_ffn);
    m.def("combine", &call_combine);
    m.def("dispatch", &call_dispatch);
    m.def("exp", [](Address x, int64_t n, Address out) { kernels().exp(at<float>(x), n, at<float>(out)); });
    m.def("tanh", [](Address x, int64_t n, Address out) { kernels().tanh(at<float>(x), n, at<float>(out)); });
    m.def("linear_heads", &call_linear_heads);
    m.def("soft_cap", &call_soft_cap);
    m.def("kv_copy", &call_kv_copy);
    m.def("swap_search", &call_swap_search);
    m.def("sliced_ffn", &call_sliced_ffn);
    m.def("expert_inner", &call_expert_inner);
    m.def("choose_slices", &call_choose_slices);
    m.def("sliced_experts", &call_sliced_experts);
    m.def("choose_by_neurons", &call_choose_by_neurons);
    m.def("fma_turns", [](int64_t turns) { return kernels().fma_turns(turns); });
}
