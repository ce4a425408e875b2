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
#include "segments.h"
#include "steps.h"
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

bool call_linear(py::handle x_, const PackedPanels& w, py::handle bias_, py::handle out_, bool add) {
    Argument x, bias, out;
    const int64_t K = w.view().num_inputs, N = w.view().num_outputs;
    if (!read(x_, x) || !read(out_, out) || !x.is_rows(K) || !out.is_rows(N) || x.shape[0] != out.shape[0] ||
        !read_vector(bias_, bias, N))
        return false;
    py::gil_scoped_release release;
    linear_in_parts(*active, w.view(), x.floats(), x.strides[0], x.shape[0], bias.floats(), out.floats(), out.strides[0],
                    add);
    return true;
}

bool call_linear_heads(py::handle x_, const PackedHeads& heads, py::handle out_) {
    Argument x, out;
    const int64_t H = static_cast<int64_t>(heads.views().size());
    const Panels& first = heads.views()[0];
    if (!read(x_, x) || !read(out_, out) || x.ndim != 3 || !x.is_heads(x.shape[0], H, first.num_inputs) ||
        !out.is_heads(x.shape[0], H, first.num_outputs))
        return false;
    py::gil_scoped_release release;
    heads_in_parts(*active, heads.views(), x.floats(), x.strides[0], x.strides[1], x.shape[0], out.floats(),
                   out.strides[0], out.strides[1]);
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
    if (!read(x_, x) || !read(out_, out) || x.ndim != 2) return false;
    const int64_t D = x.shape[1];
    if (!read_vector(weight_, weight, D) || !x.is_rows(D) || !out.is_rows(D) || x.shape[0] != out.shape[0]) return false;
    py::gil_scoped_release release;
    active->rms_norm(x.floats(), x.strides[0], weight.floats(), eps, x.shape[0], D, out.floats(), out.strides[0]);
    return true;
}

bool call_head_norm_rope(py::handle x_, py::handle weight_, float eps, py::handle cos_, py::handle sin_,
                         py::handle positions_, bool interleaved) {
    Argument x, weight, cos, sin, positions;
    if (!read(x_, x) || !read(cos_, cos) || !read(sin_, sin) || !read(positions_, positions) || x.ndim != 3) return false;
    const int64_t T = x.shape[0], H = x.shape[1], P = x.shape[2];
    if (!x.is_heads(T, H, P) || !read_vector(weight_, weight, P) || !cos.is_dense(FLOAT32, 2) ||
        !sin.is_dense(FLOAT32, 2) || !positions.is_dense(INT32, 1) || positions.shape[0] != T)
        return false;
    const int64_t S = cos.shape[0], C = cos.shape[1];
    if (2 * C > P || sin.shape[0] != S || sin.shape[1] != C) return false;
    check_range("positions", positions.ints(), T, 0, S);
    py::gil_scoped_release release;
    active->head_norm_rope(x.floats(), x.strides[0], x.strides[1], T, H, P, weight.floats(), eps, cos.floats(),
                           sin.floats(), C, interleaved, positions.ints());
    return true;
}

bool call_soft_cap(py::handle x_, float cap) {
    Argument x;
    if (!read(x_, x) || x.ndim != 2 || !x.is_rows(x.shape[1]) || !(cap > 0)) return false;
    py::gil_scoped_release release;
    active->soft_cap(x.floats(), x.strides[0], x.shape[0], x.shape[1], cap);
    return true;
}

bool read_pages(py::handle k_pages_, py::handle v_pages_, KvPages& pages) {
    Argument k, v;
    if (!read(k_pages_, k) || !read(v_pages_, v) || !k.is_dense(FLOAT32, 4) || !v.is_dense(FLOAT32, 4)) return false;
    if (k.shape[3] != 16 || v.shape[2] != 16 || v.shape[0] != k.shape[0] || v.shape[1] != k.shape[1]) return false;
    pages = {k.floats(), v.floats(), k.shape[0], k.shape[1], k.shape[2], v.shape[3]};
    return true;
}

bool call_kv_write(py::handle k_, py::handle v_, py::handle k_pages_, py::handle v_pages_, py::handle slots_) {
    Argument k, v, slots;
    KvPages pages;
    if (!read(k_, k) || !read(v_, v) || !read(slots_, slots) || !read_pages(k_pages_, v_pages_, pages) ||
        !slots.is_dense(INT32, 1))
        return false;
    const int64_t T = slots.shape[0];
    if (!k.is_heads(T, pages.G, pages.P) || !v.is_heads(T, pages.G, pages.Pv)) return false;
    check_range("slots", slots.ints(), T, 0, pages.num_blocks * 16);
    py::gil_scoped_release release;
    write_kv(pages, k.floats(), k.strides[0], k.strides[1], v.floats(), v.strides[0], v.strides[1], slots.ints(), T);
    return true;
}

// Blocks of `block_bytes` bytes each, wherever they are.
bool call_kv_copy(Address pages, int64_t num_blocks, int64_t block_bytes, py::handle source_, py::handle destination_) {
    Argument source, destination;
    if (!read(source_, source) || !read(destination_, destination) || !source.is_dense(INT32, 1) ||
        !destination.is_dense(INT32, 1) || source.shape[0] != destination.shape[0])
        return false;
    const int64_t n = source.shape[0];
    check_range("source", source.ints(), n, 0, num_blocks);
    check_range("destination", destination.ints(), n, 0, num_blocks);
    py::gil_scoped_release release;
    for (int64_t i = 0; i < n; ++i)
        std::memcpy(at<char>(pages) + destination.ints()[i] * block_bytes, at<char>(pages) + source.ints()[i] * block_bytes,
                    static_cast<size_t>(block_bytes));
    return true;
}

// Whether a row sees blocks that the next one does not: in a run of neighbours of one request it does so by a window only.
void check_tables(const AttentionCall& call) {
    for (int64_t t = 0; t < call.T; ++t) {
        const int64_t request = call.row_request[t], length = call.row_position[t] + 1;
        const bool run_goes_on = t + 1 < call.T && call.row_request[t + 1] == request &&
                                 call.row_position[t + 1] >= call.row_position[t];
        if (call.window == 0 && run_goes_on) continue;  // the last row's blocks include the others'
        const int64_t first = (length - seen_by(call, t)) / 16;
        check_range("block_tables", call.block_tables + request * call.M + first, (length - 1) / 16 + 1 - first, 0,
                    call.pages.num_blocks);
    }
}

bool run_paged_attention(py::handle q_, py::handle k_pages_, py::handle v_pages_, py::handle tables_,
                         py::handle row_request_, py::handle row_position_, float scale, py::handle window_,
                         py::handle sinks_, py::handle soft_cap_, py::handle bias_, py::handle own_position_,
                         py::handle out_) {
    Argument q, tables, row_request, row_position, sinks, out;
    KvPages pages;
    if (!read(q_, q) || !read_pages(k_pages_, v_pages_, pages) || !read(tables_, tables) ||
        !read(row_request_, row_request) || !read(row_position_, row_position) || !read(out_, out) || q.ndim != 3)
        return false;
    const int64_t T = q.shape[0], H = q.shape[1];
    if (pages.G < 1 || H % pages.G || !q.is_heads(T, H, pages.P) || !out.is_heads(T, H, pages.Pv) ||
        !tables.is_dense(INT32, 2) || !row_request.is_dense(INT32, 1) || row_request.shape[0] != T ||
        !row_position.is_dense(INT32, 1) || row_position.shape[0] != T || !read_vector(sinks_, sinks, H))
        return false;
    const int64_t window = window_.is_none() ? 0 : window_.cast<int64_t>();
    const float soft_cap = soft_cap_.is_none() ? 0.0f : soft_cap_.cast<float>();
    if ((window < 1 && !window_.is_none()) || (!(soft_cap > 0) && !soft_cap_.is_none())) return false;
    Argument bias, own_position;
    if (!bias_.is_none() &&
        (!read(bias_, bias) || !bias.is_dense(FLOAT32, 2) || bias.shape[0] != H || bias.shape[1] % 2 == 0 ||
         !read(own_position_, own_position) || !own_position.is_dense(INT32, 1) || own_position.shape[0] != T))
        return false;
    const int64_t reach = bias.ndim == 2 ? bias.shape[1] / 2 : 0;
    const int64_t B = tables.shape[0], M = tables.shape[1];
    const AttentionCall call{q.floats(), q.strides[0], q.strides[1], pages, tables.ints(), M, row_request.ints(),
                             row_position.ints(), scale, out.floats(), out.strides[0], out.strides[1], T, H,
                             window, sinks.floats(), soft_cap, bias.floats(), reach, own_position.ints()};
    check_range("row_request", call.row_request, T, 0, B);
    check_range("row_position", call.row_position, T, 0, M * 16);
    check_tables(call);
    py::gil_scoped_release release;
    attention_in_parts(*active, call);
    return true;
}

bool call_paged_attention(py::handle q, py::handle k_pages, py::handle v_pages, py::handle tables,
                          py::handle row_request, py::handle row_position, float scale, py::handle window,
                          py::handle sinks, py::handle soft_cap, py::handle out) {
    return run_paged_attention(q, k_pages, v_pages, tables, row_request, row_position, scale, window, sinks, soft_cap,
                               py::none(), py::none(), out);
}

bool call_biased_attention(py::handle q, py::handle k_pages, py::handle v_pages, py::handle tables,
                           py::handle row_request, py::handle row_position, float scale, py::handle bias,
                           py::handle own_position, py::handle out) {
    return !bias.is_none() && run_paged_attention(q, k_pages, v_pages, tables, row_request, row_position, scale,
                                                  py::none(), py::none(), py::none(), bias, own_position, out);
}

// The fields of kernels.reference.gate_topk.GateRule, in order.
bool read_rule(py::handle rule_, int64_t E, GateCall& call) {
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
bool read_counts(py::handle counts_, py::handle slots_, py::handle counted_, GateCall& call) {
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
bool read_counting(py::handle counting, GateCall& call) {
    if (counting.is_none()) return read_counts(py::none(), py::none(), py::none(), call);
    if (!PyTuple_Check(counting.ptr()) || PyTuple_GET_SIZE(counting.ptr()) != 3) return false;
    const auto item = [&](int i) { return py::handle(PyTuple_GET_ITEM(counting.ptr(), i)); };
    return !item(0).is_none() && read_counts(item(0), item(1), item(2), call);
}

bool call_gate_topk(py::handle logits_, int64_t k, py::handle rule, py::handle counting, py::handle ids_,
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
    active->gate_topk(call);
    return true;
}

void check_resident(const Bank::Table& table, const int32_t* ids, int64_t R) {
    const int64_t E = static_cast<int64_t>(table.size());
    for (int64_t i = 0; i < R; ++i)
        if (ids[i] < 0 || ids[i] >= E || !table[ids[i]])
            throw py::index_error("expert_ids: entry " + text(i) + " asks for expert " + text(ids[i]) +
                                  ", which is not resident in this bank of " + text(E));
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
    check_resident(*table, ids, R);
    check_range("rows", rows, R, 0, x.shape[0]);
    py::gil_scoped_release release;

    run_experts(*active, *table, x.floats(), x.strides[0], rows, ids, R, out.floats(), out.strides[0]);
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

// grouped_ffn over all slots, then combine. Returns whether `hidden` is finite after it, or None if an argument does not
// fit.
py::object call_experts(py::handle x_, py::handle expert_ids_, py::handle weights_, const Bank& bank, py::handle hidden_,
                        py::handle expert_out_) {
    Argument x, expert_ids, weights, hidden, expert_out;
    if (!read(x_, x) || !read(expert_out_, expert_out) || !read(expert_ids_, expert_ids) || !read(weights_, weights) || !read(hidden_, hidden) ||
        !expert_ids.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) || !x.is_rows(bank.D()) || !hidden.is_rows(bank.D()))
        return py::none();
    const int64_t T = expert_ids.shape[0], K = expert_ids.shape[1], D = bank.D(), R = T * K;
    if (weights.shape[0] != T || weights.shape[1] != K || x.shape[0] != T || hidden.shape[0] != T ||
        !expert_out.is_rows(D) || expert_out.shape[0] != R)
        return py::none();
    const auto table = bank.table();
    check_resident(*table, expert_ids.ints(), R);
    bool is_finite;
    {
        py::gil_scoped_release release;
        static thread_local std::vector<int32_t> rows, slots;
        rows.resize(R);
        slots.resize(R);
        for (int64_t i = 0; i < R; ++i) {
            rows[i] = static_cast<int32_t>(i / K);
            slots[i] = static_cast<int32_t>(i);
        }
        float* out = expert_out.floats();
        const int64_t stride = expert_out.strides[0];
        run_experts(*active, *table, x.floats(), x.strides[0], rows.data(), expert_ids.ints(), R, out, stride);
        active->combine(out, stride, slots.data(), weights.floats(), T, K, D, hidden.floats(), hidden.strides[0]);
        is_finite = active->finite(hidden.floats(), hidden.strides[0], T, D);
    }
    return py::bool_(is_finite);
}

// Reads what AttentionSegment points to. The caller has checked the shapes: kernels/segments.py.
std::unique_ptr<AttentionSegment> new_attention_segment(py::dict given) {
    auto segment = std::make_unique<AttentionSegment>();
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

// False if an argument does not fit.
bool call_attention_segment(const AttentionSegment& s, py::handle hidden_, py::handle x_, py::handle positions_,
                            py::handle slots_, py::handle row_request_, py::handle block_tables_, py::handle buffer_,
                            py::handle logits_, py::handle ids_, py::handle weights_, py::handle counts,
                            py::handle counted) {
    Argument hidden, x, positions, slots, row_request, tables, buffer, logits, ids, weights;
    if (!read(hidden_, hidden) || !read(x_, x) || !read(positions_, positions) || !read(slots_, slots) ||
        !read(row_request_, row_request) || !read(block_tables_, tables) || !read(buffer_, buffer) || !hidden.is_rows(s.D) || !x.is_rows(s.D))
        return false;
    const int64_t T = hidden.shape[0];
    if (x.shape[0] != T || !tables.is_dense(INT32, 2) || !buffer.is_dense(FLOAT32, 1) ||
        buffer.shape[0] < T * 2 * (s.H + s.G) * s.P)
        return false;
    for (const Argument* indices : {&positions, &slots, &row_request})
        if (!indices->is_dense(INT32, 1) || indices->shape[0] != T) return false;
    GateCall gate = s.rule;
    if (s.gate) {
        if (!read(ids_, ids) || !read(weights_, weights) || !read(logits_, logits) || !logits.is_dense(FLOAT32, 2) ||
            logits.shape[0] != T || logits.shape[1] != s.rule.E || !ids.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) ||
            ids.shape[0] != T || ids.shape[1] != s.rule.k || weights.shape[0] != T || weights.shape[1] != s.rule.k)
            return false;
        gate.T = T;
        gate.ids = ids.ints();
        gate.weights = weights.floats();
        if (!read_counts(counts, slots_, counted, gate)) return false;
    }
    const SegmentRows rows{T, hidden.floats(), x.floats(), hidden.strides[0], x.strides[0], positions.ints(),
                           slots.ints(), row_request.ints(), tables.ints(), tables.shape[1], buffer.floats(),
                           logits.floats()};
    check_range("positions", rows.positions, T, 0, std::min(s.S, rows.M * 16));
    check_range("slots", rows.slots, T, 0, s.pages.num_blocks * 16);
    check_range("row_request", rows.row_request, T, 0, tables.shape[0]);
    AttentionCall seen{};
    seen.pages = s.pages;
    seen.block_tables = rows.block_tables;
    seen.M = rows.M;
    seen.row_request = rows.row_request;
    seen.row_position = rows.positions;
    seen.T = T;
    seen.window = s.window;
    check_tables(seen);
    py::gil_scoped_release release;
    run_attention_segment(*active, s, rows, gate);
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

// (objective at first, objective at the best), or None when an argument does not fit; see kernels/reference/swap_search.py.
py::object call_swap_search(py::handle mass_, py::handle first_, py::handle second_, py::handle tolerances_,
                            py::handle group_, py::handle best_group_, py::handle loads_, py::handle costs_,
                            py::handle changes_, int dropped) {
    Argument mass, first, second, tolerances, group, best_group, loads, costs, changes;
    if (!read(mass_, mass) || !read(first_, first) || !read(second_, second) || !read(tolerances_, tolerances) ||
        !read(group_, group) || !read(best_group_, best_group) || !read(loads_, loads) || !read(costs_, costs) ||
        !read(changes_, changes) || !mass.is_dense(FLOAT32, 2) || !loads.is_dense(FLOAT32, 2) ||
        !costs.is_dense(FLOAT32, 2))
        return py::none();
    const int64_t F = mass.shape[0], B = mass.shape[1], N = loads.shape[0], I = first.ndim == 1 ? first.shape[0] : 0;
    const auto is_list = [](const Argument& a, Item item, int64_t n) { return a.is_dense(item, 1) && a.shape[0] == n; };
    if (B % 16 || N < 2 || N > 8 || dropped < 1 || dropped >= N || loads.shape[1] != B || costs.shape[0] != 2 ||
        costs.shape[1] != B || !is_list(first, INT32, I) || !is_list(second, INT32, I) ||
        !is_list(tolerances, FLOAT32, I) || !is_list(changes, FLOAT32, I) || !is_list(group, INT32, F) ||
        !is_list(best_group, INT32, F))
        return py::none();
    check_range("first", first.ints(), I, 0, F);
    check_range("second", second.ints(), I, 0, F);
    check_range("group", group.ints(), F, 0, N);
    double objective[2];
    {
        py::gil_scoped_release release;
        active->swap_search({mass.floats(), F, B, N, dropped, first.ints(), second.ints(), tolerances.floats(), I,
                             group.ints(), best_group.ints(), loads.floats(), costs.floats(), changes.floats(),
                             objective});
    }
    return py::make_tuple(objective[0], objective[1]);
}

void call_tanh(Address x, int64_t n, Address out) { active->tanh(at<float>(x), n, at<float>(out)); }
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
        .def("fill_codes",
             [](PackedPanels& self, int64_t first, Address codes, Address scales, int64_t count) {
                 py::gil_scoped_release release;
                 self.fill_codes(first, at<void>(codes), at<void>(scales), count);
             })
        .def_property_readonly("nbytes", &PackedPanels::nbytes);
    py::class_<PackedExpert, std::shared_ptr<PackedExpert>>(m, "PackedExpert")
        .def(py::init<std::shared_ptr<PackedPanels>, std::shared_ptr<PackedPanels>, int, float, float, bool>())
        .def("fill_bias",
             [](PackedExpert& self, int64_t first, Address values, int64_t count) {
                 self.fill_bias(first, at<float>(values), count);
             })
        .def_property_readonly("nbytes", &PackedExpert::nbytes);
    py::class_<AttentionSegment>(m, "AttentionSegment").def(py::init(&new_attention_segment));
    m.def("attention_segment", &call_attention_segment);
    m.def("experts", &call_experts);
    py::class_<PackedHeads>(m, "PackedHeads").def(py::init<std::vector<std::shared_ptr<PackedPanels>>>());
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
    m.def("biased_attention", &call_biased_attention);
    m.def("gate_topk", &call_gate_topk);
    m.def("grouped_ffn", &call_grouped_ffn);
    m.def("combine", &call_combine);
    m.def("dispatch", &call_dispatch);
    m.def("exp", &call_exp);
    m.def("tanh", &call_tanh);
    m.def("linear_heads", &call_linear_heads);
    m.def("soft_cap", &call_soft_cap);
    m.def("kv_copy", &call_kv_copy);
    m.def("swap_search", &call_swap_search);
    m.def("fma_turns", [](int64_t turns) { return active->fma_turns(turns); });
}
