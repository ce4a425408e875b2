// Calls that run experts, and send rows to them. Used by module.cpp only.
#pragma once
#include <pybind11/numpy.h>

#include "call.h"
#include "steps.h"

namespace edge {

inline bool call_grouped_ffn(py::handle x_, py::handle rows_, py::handle expert_ids_, const Bank& bank, py::handle out_) {
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
    const Spending spending(EXPERTS);

    run_experts(kernels(), *table, x.floats(), x.strides[0], rows, ids, R, out.floats(), out.strides[0]);
    return true;
}

inline bool call_combine(py::handle expert_out_, py::handle slots_, py::handle weights_, py::handle hidden_) {
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
    const Spending spending(EXPERTS);
    kernels().combine(expert_out.floats(), expert_out.strides[0], slots.ints(), weights.floats(), T, K, D,
                    hidden.floats(), hidden.strides[0]);
    return true;
}

// grouped_ffn over all slots, then combine. Returns whether `hidden` is finite after it, or None if an argument does not
// fit.
inline py::object call_experts(py::handle x_, py::handle expert_ids_, py::handle weights_, const Bank& bank, py::handle hidden_,
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
        const Spending spending(EXPERTS);
        is_finite = run_and_combine(kernels(), *table, x.floats(), x.strides[0], expert_ids.ints(), weights.floats(), T, K, D,
                                    hidden.floats(), hidden.strides[0], expert_out.floats(), expert_out.strides[0]);
    }
    return py::bool_(is_finite);
}

// Fills `buffer` (int32, room for 3 * T * K) with pairs [R], rows [U], pair_rows [R], one after another. Returns
// (R, U, offsets, row_offsets), or None if an argument does not fit.
inline py::object call_dispatch(py::handle expert_ids_, py::handle host_of_expert_, int64_t num_hosts, py::handle buffer_) {
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

}  // namespace edge
