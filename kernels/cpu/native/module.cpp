// kernels.cpu._native: tensors in, work done without the GIL.
//
// Says yes or no to shapes and dtypes; which argument is at fault is for kernels/ops.py to say. What only the values tell
// (ids, slots, positions that point nowhere) is an error from here.
#include <pybind11/pybind11.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>

#include "arguments.h"
#include "packed.h"
#include "parts.h"
#include "table.h"

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

// Every call_* below returns false, having done nothing, when an argument does not fit; kernels/ops.py then says which.

bool call_linear(py::handle x_, const PackedPanels& w, py::handle out_, bool add) {
    Argument x, out;
    const int64_t K = w.view().num_inputs, N = w.view().num_outputs;
    if (!read(x_, x) || !read(out_, out) || !x.is_rows(K) || !out.is_rows(N) || x.shape[0] != out.shape[0]) return false;
    py::gil_scoped_release release;
    linear_in_parts(*active, w.view(), x.floats(), x.strides[0], x.shape[0], out.floats(), out.strides[0], add);
    return true;
}

bool call_embed(py::handle ids_, const PackedPanels& w, py::handle out_) {
    Argument ids, out;
    if (!read(ids_, ids) || !read(out_, out) || !ids.is_dense(INT32, 1) || !out.is_rows(w.view().num_inputs) ||
        ids.shape[0] != out.shape[0])
        return false;
    check_range("token_ids", ids.ints(), ids.shape[0], 0, w.view().num_outputs);
    py::gil_scoped_release release;
    for (int64_t t = 0; t < ids.shape[0]; ++t) w.widen_row(ids.ints()[t], out.floats() + t * out.strides[0]);
    return true;
}

bool call_rms_norm(py::handle x_, py::handle weight_, float eps, py::handle out_) {
    Argument x, weight, out;
    if (!read(x_, x) || !read(weight_, weight) || !read(out_, out) || !weight.is_dense(FLOAT32, 1)) return false;
    const int64_t D = weight.shape[0];
    if (!x.is_rows(D) || !out.is_rows(D) || x.shape[0] != out.shape[0]) return false;
    py::gil_scoped_release release;
    active->rms_norm(x.floats(), x.strides[0], weight.floats(), eps, x.shape[0], D, out.floats(), out.strides[0]);
    return true;
}

bool call_head_norm_rope(py::handle x_, py::handle weight_, float eps, py::handle cos_, py::handle sin_,
                         py::handle positions_) {
    Argument x, weight, cos, sin, positions;
    if (!read(x_, x) || !read(cos_, cos) || !read(sin_, sin) || !read(positions_, positions)) return false;
    if (x.item != FLOAT32 || x.ndim != 3 || x.shape[2] % 2 || x.strides[2] != 1) return false;
    const int64_t T = x.shape[0], H = x.shape[1], P = x.shape[2], S = cos.shape[0];
    const bool normed = !weight_.is_none();
    if (normed && (!read(weight_, weight) || !weight.is_dense(FLOAT32, 1) || weight.shape[0] != P)) return false;
    if (!cos.is_dense(FLOAT32, 2) || !sin.is_dense(FLOAT32, 2) || cos.shape[1] != P / 2 || sin.shape[1] != P / 2 ||
        sin.shape[0] != S || !positions.is_dense(INT32, 1) || positions.shape[0] != T)
        return false;
    check_range("positions", positions.ints(), T, 0, S);
    py::gil_scoped_release release;
    active->head_norm_rope(x.floats(), x.strides[0], x.strides[1], T, H, P, normed ? weight.floats() : nullptr, eps,
                           cos.floats(), sin.floats(), positions.ints());
    return true;
}

bool read_pages(py::handle k_pages_, py::handle v_pages_, KvPages& pages) {
    Argument k, v;
    if (!read(k_pages_, k) || !read(v_pages_, v) || !k.is_dense(FLOAT32, 4) || !v.is_dense(FLOAT32, 4)) return false;
    if (k.shape[3] != 16 || v.shape[2] != 16 || v.shape[0] != k.shape[0] || v.shape[1] != k.shape[1] ||
        v.shape[3] != k.shape[2])
        return false;
    pages = {k.floats(), v.floats(), k.shape[0], k.shape[1], k.shape[2]};
    return true;
}

bool call_kv_write(py::handle k_, py::handle v_, py::handle k_pages_, py::handle v_pages_, py::handle slots_) {
    Argument k, v, slots;
    KvPages pages;
    if (!read(k_, k) || !read(v_, v) || !read(slots_, slots) || !read_pages(k_pages_, v_pages_, pages) ||
        !slots.is_dense(INT32, 1))
        return false;
    const int64_t T = slots.shape[0], G = pages.G, P = pages.P;
    if (!k.is_heads(T, G, P) || !v.is_heads(T, G, P)) return false;
    const int32_t* slot = slots.ints();
    check_range("slots", slot, T, 0, pages.num_blocks * 16);
    py::gil_scoped_release release;
    for (int64_t t = 0; t < T; ++t) {
        const int64_t block = slot[t] / 16, offset = slot[t] % 16;
        for (int64_t g = 0; g < G; ++g) {
            const float* from = k.floats() + t * k.strides[0] + g * P;
            float* to = pages.k + (block * G + g) * P * 16 + offset;
            for (int64_t p = 0; p < P; ++p) to[p * 16] = from[p];
            std::memcpy(pages.v + ((block * G + g) * 16 + offset) * P, v.floats() + t * v.strides[0] + g * P,
                        static_cast<size_t>(P) * sizeof(float));
        }
    }
    return true;
}

bool call_paged_attention(py::handle q_, py::handle k_pages_, py::handle v_pages_, py::handle tables_,
                          py::handle row_request_, py::handle row_position_, float scale, py::handle out_) {
    Argument q, tables, row_request, row_position, out;
    KvPages pages;
    if (!read(q_, q) || !read_pages(k_pages_, v_pages_, pages) || !read(tables_, tables) ||
        !read(row_request_, row_request) || !read(row_position_, row_position) || !read(out_, out) || q.ndim != 3)
        return false;
    const int64_t T = q.shape[0], H = q.shape[1];
    if (pages.G < 1 || H % pages.G || !q.is_heads(T, H, pages.P) || !out.is_heads(T, H, pages.P) ||
        !tables.is_dense(INT32, 2) || !row_request.is_dense(INT32, 1) || row_request.shape[0] != T ||
        !row_position.is_dense(INT32, 1) || row_position.shape[0] != T)
        return false;
    const int64_t B = tables.shape[0], M = tables.shape[1];
    const AttentionCall call{q.floats(),         q.strides[0], pages,        tables.ints(),  M, row_request.ints(),
                             row_position.ints(), scale,        out.floats(), out.strides[0], T, H};
    check_range("row_request", call.row_request, T, 0, B);
    check_range("row_position", call.row_position, T, 0, M * 16);
    for (int64_t t = 0; t < T; ++t) {
        // In a run of rows of one request with rising positions the last row's blocks include the others'.
        const int64_t request = call.row_request[t];
        if (t + 1 < T && call.row_request[t + 1] == request && call.row_position[t + 1] >= call.row_position[t]) continue;
        check_range("block_tables", call.block_tables + request * M, call.row_position[t] / 16 + 1, 0, pages.num_blocks);
    }
    py::gil_scoped_release release;
    attention_in_parts(*active, call);
    return true;
}

bool call_gate_topk(py::handle logits_, int64_t k, bool renormalise, py::handle ids_, py::handle weights_) {
    Argument logits, ids, weights;
    if (!read(logits_, logits) || !read(ids_, ids) || !read(weights_, weights) || logits.ndim != 2) return false;
    const int64_t T = logits.shape[0], E = logits.shape[1];
    if (!logits.is_rows(E) || k < 1 || k > E || !ids.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) ||
        ids.shape[0] != T || ids.shape[1] != k || weights.shape[0] != T || weights.shape[1] != k)
        return false;
    py::gil_scoped_release release;
    active->gate_topk(logits.floats(), logits.strides[0], T, E, k, renormalise, ids.ints(), weights.floats());
    return true;
}

bool call_grouped_ffn(py::handle x_, py::handle rows_, py::handle expert_ids_, const Bank& bank, py::handle out_) {
    Argument x, row, expert_id, out;
    if (!read(x_, x) || !read(rows_, row) || !read(expert_ids_, expert_id) || !read(out_, out)) return false;
    if (!row.is_dense(INT32, 1) || !expert_id.is_dense(INT32, 1) || !x.is_rows(bank.D()) || !out.is_rows(bank.D()))
        return false;
    const int64_t R = row.shape[0];
    if (expert_id.shape[0] != R || out.shape[0] != R) return false;
    const auto table = bank.table();
    const int32_t *rows = row.ints(), *ids = expert_id.ints();
    const int64_t E = static_cast<int64_t>(table->size());
    for (int64_t i = 0; i < R; ++i)
        if (ids[i] < 0 || ids[i] >= E || !(*table)[ids[i]])
            throw py::index_error("expert_ids: entry " + text(i) + " asks for expert " + text(ids[i]) +
                                  ", which is not resident in this bank of " + text(E));
    check_range("rows", rows, R, 0, x.shape[0]);
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
            experts.push_back(&(*table)[e]->view());
        }
        next[e + 1] += next[e];
    }
    offsets.push_back(R);
    for (int64_t i = 0; i < R; ++i) {  // stable: an expert meets its rows in the order given
        const int64_t place = next[ids[i]]++;
        sorted[place] = rows[i];
        sorted[R + place] = static_cast<int32_t>(i);
    }
    experts_in_parts(*active, {x.floats(), x.strides[0], sorted.data(), sorted.data() + R, offsets.data(),
                               experts.data(), static_cast<int64_t>(experts.size()), out.floats(), out.strides[0]});
    return true;
}

bool call_combine(py::handle expert_out_, py::handle slots_, py::handle weights_, py::handle hidden_) {
    Argument expert_out, slots, weights, hidden;
    if (!read(expert_out_, expert_out) || !read(slots_, slots) || !read(weights_, weights) || !read(hidden_, hidden) ||
        hidden.ndim != 2)
        return false;
    const int64_t D = hidden.shape[1];
    if (!slots.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) || weights.shape[0] != slots.shape[0] ||
        weights.shape[1] != slots.shape[1] || !hidden.is_rows(D) || hidden.shape[0] != slots.shape[0] ||
        !expert_out.is_rows(D))
        return false;
    const int64_t T = slots.shape[0], K = slots.shape[1];
    check_range("slots", slots.ints(), T * K, -1, expert_out.shape[0]);
    py::gil_scoped_release release;
    active->combine(expert_out.floats(), expert_out.strides[0], slots.ints(), weights.floats(), T, K, D,
                    hidden.floats(), hidden.strides[0]);
    return true;
}

// Fills `buffer` (int32, room for 3 * T * K) with pairs [R], rows [U], pair_rows [R], one after another. Returns
// (R, U, offsets, row_offsets), or None if an argument does not fit.
py::object call_dispatch(py::handle expert_ids_, py::handle host_of_expert_, int64_t num_hosts, py::handle buffer_) {
    Argument expert_ids, host_of_expert, buffer;
    if (!read(expert_ids_, expert_ids) || !read(host_of_expert_, host_of_expert) || !read(buffer_, buffer) ||
        !expert_ids.is_dense(INT32, 2) || !host_of_expert.is_dense(INT32, 1) || !buffer.is_dense(INT32, 1))
        return py::none();
    const int64_t T = expert_ids.shape[0], K = expert_ids.shape[1], E = host_of_expert.shape[0];
    if (num_hosts < 0 || buffer.shape[0] < 3 * T * K) return py::none();
    const int32_t *ids = expert_ids.ints(), *hosts = host_of_expert.ints();
    check_range("expert_ids", ids, T * K, 0, E);
    check_range("host_of_expert", hosts, E, -1, num_hosts);
    static thread_local std::vector<int64_t> last, next, next_row;
    last.assign(num_hosts, -1);
    next.assign(num_hosts + 1, 0);
    next_row.assign(num_hosts + 1, 0);
    for (int64_t t = 0; t < T; ++t)
        for (int64_t j = 0; j < K; ++j) {
            const int32_t host = hosts[ids[t * K + j]];
            if (host < 0) continue;
            ++next[host + 1];
            next_row[host + 1] += last[host] != t;
            last[host] = t;
        }
    for (int64_t n = 0; n < num_hosts; ++n) {
        next[n + 1] += next[n];
        next_row[n + 1] += next_row[n];
        last[n] = -1;
    }
    const int64_t R = next[num_hosts], U = next_row[num_hosts];
    int32_t* pairs = buffer.ints();
    int32_t* rows = pairs + R;
    int32_t* pair_rows = rows + U;
    py::array_t<int32_t> offsets_array(num_hosts + 1), row_offsets_array(num_hosts + 1);
    int32_t *offsets = offsets_array.mutable_data(), *row_offsets = row_offsets_array.mutable_data();
    for (int64_t n = 0; n <= num_hosts; ++n) {
        offsets[n] = static_cast<int32_t>(next[n]);
        row_offsets[n] = static_cast<int32_t>(next_row[n]);
    }
    for (int64_t t = 0; t < T; ++t)
        for (int64_t j = 0; j < K; ++j) {
            const int32_t host = hosts[ids[t * K + j]];
            if (host < 0) continue;
            if (last[host] != t) {
                last[host] = t;
                rows[next_row[host]++] = static_cast<int32_t>(t);
            }
            pair_rows[next[host]] = static_cast<int32_t>(next_row[host] - 1 - row_offsets[host]);
            pairs[next[host]++] = static_cast<int32_t>(t * K + j);
        }
    return py::make_tuple(R, U, std::move(offsets_array), std::move(row_offsets_array));
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
        .def(py::init<std::shared_ptr<PackedPanels>, std::shared_ptr<PackedPanels>, int, float, float, bool>())
        .def("fill_bias",
             [](PackedExpert& self, int64_t first, Address values, int64_t count) {
                 self.fill_bias(first, at<float>(values), count);
             })
        .def_property_readonly("nbytes", &PackedExpert::nbytes);
    py::class_<Bank>(m, "Bank")
        .def(py::init<int64_t, int64_t>())
        .def("set", [](Bank& self, int64_t id, std::shared_ptr<PackedExpert> expert) { self.put(id, expert); })
        .def("drop", [](Bank& self, int64_t id) { self.put(id, nullptr); });
    m.def("find_torch", &find_torch);
    m.def("set_num_threads", [](int threads) {
        py::gil_scoped_release release;
        pool().resize(threads);
    });
    m.def("num_threads", [] { return pool().threads(); });
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
