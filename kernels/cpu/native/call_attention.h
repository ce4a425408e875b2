// Calls on pages of keys and values, and attention over them. Used by module.cpp only.
#pragma once
#include "call.h"
#include "parts.h"
#include "steps.h"

namespace edge {

inline bool read_pages(py::handle k_pages_, py::handle v_pages_, KvPages& pages) {
    Argument k, v;
    if (!read(k_pages_, k) || !read(v_pages_, v) || !k.is_dense(FLOAT32, 4) || !v.is_dense(FLOAT32, 4)) return false;
    if (k.shape[3] != 16 || v.shape[2] != 16 || v.shape[0] != k.shape[0] || v.shape[1] != k.shape[1]) return false;
    pages = {k.floats(), v.floats(), k.shape[0], k.shape[1], k.shape[2], v.shape[3]};
    return true;
}

inline bool call_kv_write(py::handle k_, py::handle v_, py::handle k_pages_, py::handle v_pages_, py::handle slots_) {
    Argument k, v, slots;
    KvPages pages;
    if (!read(k_, k) || !read(v_, v) || !read(slots_, slots) || !read_pages(k_pages_, v_pages_, pages) ||
        !slots.is_dense(INT32, 1))
        return false;
    const int64_t T = slots.shape[0];
    if (!k.is_heads(T, pages.G, pages.P) || !v.is_heads(T, pages.G, pages.Pv)) return false;
    check_range("slots", slots.ints(), T, 0, pages.num_blocks * 16);
    py::gil_scoped_release release;
    const Spending spending(ATTENTION);
    write_kv(pages, k.floats(), k.strides[0], k.strides[1], v.floats(), v.strides[0], v.strides[1], slots.ints(), T);
    return true;
}

// Blocks of `block_bytes` bytes each, wherever they are.
inline bool call_kv_copy(Address pages, int64_t num_blocks, int64_t block_bytes, py::handle source_, py::handle destination_) {
    Argument source, destination;
    if (!read(source_, source) || !read(destination_, destination) || !source.is_dense(INT32, 1) ||
        !destination.is_dense(INT32, 1) || source.shape[0] != destination.shape[0])
        return false;
    const int64_t n = source.shape[0];
    check_range("source", source.ints(), n, 0, num_blocks);
    check_range("destination", destination.ints(), n, 0, num_blocks);
    py::gil_scoped_release release;
    const Spending spending(ATTENTION);
    for (int64_t i = 0; i < n; ++i)
        std::memcpy(at<char>(pages) + destination.ints()[i] * block_bytes, at<char>(pages) + source.ints()[i] * block_bytes,
                    static_cast<size_t>(block_bytes));
    return true;
}

// Whether a row sees blocks that the next one does not: in a run of neighbours of one request it does so by a window only.
inline void check_tables(const AttentionCall& call) {
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

inline bool run_paged_attention(py::handle q_, py::handle k_pages_, py::handle v_pages_, py::handle tables_,
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
    const Spending spending(ATTENTION);
    attention_in_parts(kernels(), call);
    return true;
}

inline bool call_paged_attention(py::handle q, py::handle k_pages, py::handle v_pages, py::handle tables,
                          py::handle row_request, py::handle row_position, float scale, py::handle window,
                          py::handle sinks, py::handle soft_cap, py::handle out) {
    return run_paged_attention(q, k_pages, v_pages, tables, row_request, row_position, scale, window, sinks, soft_cap,
                               py::none(), py::none(), out);
}

inline bool call_biased_attention(py::handle q, py::handle k_pages, py::handle v_pages, py::handle tables,
                           py::handle row_request, py::handle row_position, float scale, py::handle bias,
                           py::handle own_position, py::handle out) {
    return !bias.is_none() && run_paged_attention(q, k_pages, v_pages, tables, row_request, row_position, scale,
                                                  py::none(), py::none(), py::none(), bias, own_position, out);
}

}  // namespace edge
