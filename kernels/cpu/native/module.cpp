// kernels.cpu._native: plain integers in (pointers, sizes, strides in elements), work done without the GIL.
//
// Shapes and dtypes are the business of kernels/ops.py. Checked here is what only the values tell: ids, slots, positions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>

#include "packed.h"
#include "table.h"

namespace py = pybind11;

namespace edge {

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

namespace {

const Kernels* best_kernels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return kernels_avx512();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kernels_avx2();
#endif
    return kernels_portable();
}

const Kernels* active = best_kernels();

std::vector<std::string> runnable_isas() {
    const std::string best = best_kernels()->isa;
    std::vector<std::string> isas;
    if (best == "avx512") isas.push_back("avx512");
    if (best == "avx512" || best == "avx2") isas.push_back("avx2");
    isas.push_back("portable");
    return isas;
}

void use_isa(const std::string& isa) {
    const auto isas = runnable_isas();
    if (std::find(isas.begin(), isas.end(), isa) == isas.end())
        throw py::value_error("isa: this machine cannot run '" + isa + "'");
#if defined(__x86_64__)
    if (isa == "avx512") active = kernels_avx512();
    if (isa == "avx2") active = kernels_avx2();
#endif
    if (isa == "portable") active = kernels_portable();
}

using Address = uintptr_t;
template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

std::string text(int64_t n) { return std::to_string(n); }

// First index whose value is outside [low, high), or -1.
int64_t outside(const int32_t* values, int64_t count, int64_t low, int64_t high) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < low || values[i] >= high) return i;
    return -1;
}

void check_range(const char* name, const int32_t* values, int64_t count, int64_t low, int64_t high) {
    const int64_t i = outside(values, count, low, high);
    if (i >= 0)
        throw py::value_error(std::string(name) + ": entry " + text(i) + " is " + text(values[i]) + ", expected " +
                              text(low) + " to " + text(high - 1));
}

void call_linear(const PackedPanels& w, Address x, int64_t x_stride, int64_t T, Address out, int64_t out_stride,
                 bool add) {
    py::gil_scoped_release release;
    active->linear(w.view(), at<float>(x), x_stride, T, at<float>(out), out_stride, add);
}

void call_embed(const PackedPanels& w, Address ids, int64_t T, Address out, int64_t out_stride) {
    const int32_t* id = at<int32_t>(ids);
    check_range("token_ids", id, T, 0, w.view().num_outputs);
    py::gil_scoped_release release;
    for (int64_t t = 0; t < T; ++t) w.widen_row(id[t], at<float>(out) + t * out_stride);
}

void call_rms_norm(Address x, int64_t x_stride, Address weight, float eps, int64_t T, int64_t D, Address out,
                   int64_t out_stride) {
    py::gil_scoped_release release;
    active->rms_norm(at<float>(x), x_stride, at<float>(weight), eps, T, D, at<float>(out), out_stride);
}

void call_head_norm_rope(Address x, int64_t token_stride, int64_t head_stride, int64_t T, int64_t H, int64_t P,
                         Address weight, float eps, Address cos, Address sin, int64_t S, Address positions) {
    check_range("positions", at<int32_t>(positions), T, 0, S);
    py::gil_scoped_release release;
    active->head_norm_rope(at<float>(x), token_stride, head_stride, T, H, P, at<float>(weight), eps, at<float>(cos),
                           at<float>(sin), at<int32_t>(positions));
}

void call_kv_write(Address k, int64_t k_stride, Address v, int64_t v_stride, int64_t T, Address k_pages,
                   Address v_pages, int64_t num_blocks, int64_t G, int64_t P, Address slots) {
    const int32_t* slot = at<int32_t>(slots);
    check_range("slots", slot, T, 0, num_blocks * 16);
    py::gil_scoped_release release;
    for (int64_t t = 0; t < T; ++t) {
        const int64_t block = slot[t] / 16, offset = slot[t] % 16;
        for (int64_t g = 0; g < G; ++g) {
            const float* from = at<float>(k) + t * k_stride + g * P;
            float* to = at<float>(k_pages) + (block * G + g) * P * 16 + offset;
            for (int64_t p = 0; p < P; ++p) to[p * 16] = from[p];
            std::memcpy(at<float>(v_pages) + ((block * G + g) * 16 + offset) * P, at<float>(v) + t * v_stride + g * P,
                        static_cast<size_t>(P) * sizeof(float));
        }
    }
}

void call_paged_attention(Address q, int64_t q_stride, int64_t T, int64_t H, Address k_pages, Address v_pages,
                          int64_t num_blocks, int64_t G, int64_t P, Address block_tables, int64_t B, int64_t M,
                          Address row_request, Address row_position, float scale, Address out, int64_t out_stride) {
    const AttentionCall call{at<float>(q), q_stride,
                             {at<float>(k_pages), at<float>(v_pages), num_blocks, G, P},
                             at<int32_t>(block_tables), M, at<int32_t>(row_request), at<int32_t>(row_position),
                             scale, at<float>(out), out_stride, T, H};
    check_range("row_request", call.row_request, T, 0, B);
    check_range("row_position", call.row_position, T, 0, M * 16);
    for (int64_t t = 0; t < T; ++t) {
        // Rows of one request stand together: the last of a run is enough when positions rise.
        const int64_t request = call.row_request[t];
        if (t + 1 < T && call.row_request[t + 1] == request && call.row_position[t + 1] >= call.row_position[t]) continue;
        check_range("block_tables", call.block_tables + request * M, call.row_position[t] / 16 + 1, 0, num_blocks);
    }
    py::gil_scoped_release release;
    active->paged_attention(call);
}

void call_gate_topk(Address logits, int64_t stride, int64_t T, int64_t E, int64_t k, bool renormalise, Address ids,
                    Address weights) {
    py::gil_scoped_release release;
    active->gate_topk(at<float>(logits), stride, T, E, k, renormalise, at<int32_t>(ids), at<float>(weights));
}

void call_grouped_ffn(const Bank& bank, Address x, int64_t x_stride, int64_t T, Address rows_, Address expert_ids,
                      int64_t R, Address out, int64_t out_stride) {
    const auto table = bank.table();
    const int32_t* rows = at<int32_t>(rows_);
    const int32_t* ids = at<int32_t>(expert_ids);
    const int64_t E = static_cast<int64_t>(table->size());
    for (int64_t i = 0; i < R; ++i)
        if (ids[i] < 0 || ids[i] >= E || !(*table)[ids[i]])
            throw py::index_error("expert_ids: entry " + text(i) + " asks for expert " + text(ids[i]) +
                                  ", which is not resident in this bank of " + text(E));
    check_range("rows", rows, R, 0, T);
    py::gil_scoped_release release;

    static thread_local std::vector<int64_t> next, offsets;
    static thread_local std::vector<int32_t> sorted;
    static thread_local std::vector<const Expert*> experts;
    next.assign(E + 1, 0);
    sorted.resize(2 * R);
    offsets.clear();
    experts.clear();
    for (int64_t i = 0; i < R; ++i) ++next[ids[i] + 1];
    for (int64_t e = 0; e < E; ++e) {
        if (next[e + 1] > 0) {
            offsets.push_back(next[e]);
            experts.push_back(&(*table)[e]->view);
        }
        next[e + 1] += next[e];
    }
    offsets.push_back(R);
    for (int64_t i = 0; i < R; ++i) {  // stable: an expert meets its rows in the order given
        const int64_t place = next[ids[i]]++;
        sorted[place] = rows[i];
        sorted[R + place] = static_cast<int32_t>(i);
    }
    active->grouped_ffn({at<float>(x), x_stride, sorted.data(), sorted.data() + R, offsets.data(), experts.data(),
                         static_cast<int64_t>(experts.size()), at<float>(out), out_stride});
}

void call_combine(Address expert_out, int64_t stride, int64_t R, Address slots, Address weights, int64_t T, int64_t K,
                  int64_t D, Address hidden, int64_t hidden_stride) {
    check_range("slots", at<int32_t>(slots), T * K, -1, R);
    py::gil_scoped_release release;
    active->combine(at<float>(expert_out), stride, at<int32_t>(slots), at<float>(weights), T, K, D, at<float>(hidden),
                    hidden_stride);
}

// Fills pairs, rows, pair_rows (room for T * K each), offsets and row_offsets (num_hosts + 1 each).
py::tuple call_dispatch(Address expert_ids, int64_t T, int64_t K, Address host_of_expert, int64_t E, int64_t num_hosts,
                        Address pairs_, Address rows_, Address pair_rows_, Address offsets_, Address row_offsets_) {
    const int32_t* ids = at<int32_t>(expert_ids);
    const int32_t* hosts = at<int32_t>(host_of_expert);
    int32_t *pairs = at<int32_t>(pairs_), *rows = at<int32_t>(rows_), *pair_rows = at<int32_t>(pair_rows_);
    int32_t *offsets = at<int32_t>(offsets_), *row_offsets = at<int32_t>(row_offsets_);
    check_range("expert_ids", ids, T * K, 0, E);
    check_range("host_of_expert", hosts, E, -1, num_hosts);
    py::gil_scoped_release release;
    std::vector<int64_t> last(num_hosts, -1), next(num_hosts), next_row(num_hosts);
    std::fill(offsets, offsets + num_hosts + 1, 0);
    std::fill(row_offsets, row_offsets + num_hosts + 1, 0);
    for (int64_t t = 0; t < T; ++t)
        for (int64_t j = 0; j < K; ++j) {
            const int32_t host = hosts[ids[t * K + j]];
            if (host < 0) continue;
            ++offsets[host + 1];
            row_offsets[host + 1] += last[host] != t;
            last[host] = t;
        }
    for (int64_t n = 0; n < num_hosts; ++n) {
        offsets[n + 1] += offsets[n];
        row_offsets[n + 1] += row_offsets[n];
        next[n] = offsets[n];
        next_row[n] = row_offsets[n] - 1;
        last[n] = -1;
    }
    for (int64_t t = 0; t < T; ++t)
        for (int64_t j = 0; j < K; ++j) {
            const int32_t host = hosts[ids[t * K + j]];
            if (host < 0) continue;
            if (last[host] != t) {
                last[host] = t;
                rows[++next_row[host]] = static_cast<int32_t>(t);
            }
            pair_rows[next[host]] = static_cast<int32_t>(next_row[host] - row_offsets[host]);
            pairs[next[host]++] = static_cast<int32_t>(t * K + j);
        }
    const int64_t num_pairs = offsets[num_hosts], num_rows = row_offsets[num_hosts];
    py::gil_scoped_acquire acquire;
    return py::make_tuple(num_pairs, num_rows);
}

void call_exp(Address x, int64_t n, Address out) { active->exp(at<float>(x), n, at<float>(out)); }

}  // namespace
}  // namespace edge

PYBIND11_MODULE(_native, m) {
    using namespace edge;
    m.doc() = "Native CPU kernels; see kernels/ops.py for what they mean.";
    py::class_<PackedPanels, std::shared_ptr<PackedPanels>>(m, "PackedPanels")
        .def(py::init<int64_t, int64_t, int>())
        .def("fill",
             [](PackedPanels& self, int64_t first, Address rows, int64_t count) {
                 py::gil_scoped_release release;
                 self.fill(first, at<void>(rows), count);
             })
        .def_property_readonly("nbytes", &PackedPanels::nbytes);
    py::class_<PackedExpert, std::shared_ptr<PackedExpert>>(m, "PackedExpert")
        .def(py::init<std::shared_ptr<PackedPanels>, std::shared_ptr<PackedPanels>>())
        .def_property_readonly("nbytes",
                               [](const PackedExpert& self) { return self.gate_up->nbytes() + self.down->nbytes(); });
    py::class_<Bank>(m, "Bank")
        .def(py::init<int64_t>())
        .def("set", [](Bank& self, int64_t id, std::shared_ptr<PackedExpert> expert) { self.put(id, expert); })
        .def("drop", [](Bank& self, int64_t id) { self.put(id, nullptr); });
    m.def("isa", [] { return std::string(active->isa); });
    m.def("runnable_isas", &runnable_isas);
    m.def("use_isa", &use_isa);
    m.def("linear", &call_linear);
    m.def("embed", &call_embed);
    m.def("rms_norm", &call_rms_norm);
    m.def("head_norm_rope", &call_head_norm_rope);
    m.def("kv_write", &call_kv_write);
    m.def("paged_attention", &call_paged_attention);
    m.def("gate_topk", &call_gate_topk);
    m.def("grouped_ffn", &call_grouped_ffn);
    m.def("combine", &call_combine);
    m.def("dispatch", &call_dispatch);
    m.def("exp", &call_exp);
    m.def("fma_turns", [](int64_t turns) { return active->fma_turns(turns); });
}
