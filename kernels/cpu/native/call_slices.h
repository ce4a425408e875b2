// Calls about parts of experts. Used by module.cpp only.
#pragma once
#include "call_experts.h"
#include "elastic.h"

namespace edge {

// What experts and slices a call of parts needs: masks that exist, widths that divide.
inline bool fits_parts(const Bank::Table& table, const int32_t* ids, const int32_t* masks, int64_t R, int64_t parts) {
    check_resident(table, ids, R);
    check_range("masks", masks, R, 0, int64_t(1) << parts);
    for (int64_t i = 0; i < R; ++i)
        if (table[ids[i]]->view().down.num_inputs % parts) return false;
    return true;
}

inline bool call_sliced_ffn(py::handle x_, py::handle rows_, py::handle expert_ids_, py::handle masks_, int64_t parts,
                     const Bank& bank, py::handle out_) {
    Argument x, row, expert_id, mask, out;
    if (!read(x_, x) || !read(rows_, row) || !read(expert_ids_, expert_id) || !read(masks_, mask) || !read(out_, out))
        return false;
    if (!row.is_dense(INT32, 1) || !expert_id.is_dense(INT32, 1) || !mask.is_dense(INT32, 1) || !x.is_rows(bank.D()) ||
        !out.is_rows(bank.D()))
        return false;
    const int64_t R = row.shape[0];
    if (expert_id.shape[0] != R || mask.shape[0] != R || out.shape[0] != R || parts < 1 || parts > 8) return false;
    const auto table = bank.table();
    check_range("rows", row.ints(), R, 0, x.shape[0]);
    if (!fits_parts(*table, expert_id.ints(), mask.ints(), R, parts)) return false;
    py::gil_scoped_release release;
    const Spending spending(EXPERTS);
    run_experts(kernels(), *table, x.floats(), x.strides[0], row.ints(), expert_id.ints(), R, out.floats(), out.strides[0],
                mask.ints(), parts);
    return true;
}

inline bool call_expert_inner(py::handle x_, py::handle rows_, py::handle expert_ids_, const Bank& bank, py::handle out_) {
    Argument x, row, expert_id, out;
    if (!read(x_, x) || !read(rows_, row) || !read(expert_ids_, expert_id) || !read(out_, out)) return false;
    if (!row.is_dense(INT32, 1) || !expert_id.is_dense(INT32, 1) || !x.is_rows(bank.D()) || out.ndim != 2 ||
        !out.is_rows(out.shape[1]))
        return false;
    const int64_t R = row.shape[0];
    if (expert_id.shape[0] != R || out.shape[0] != R) return false;
    const auto table = bank.table();
    check_resident(*table, expert_id.ints(), R);
    check_range("rows", row.ints(), R, 0, x.shape[0]);
    for (int64_t i = 0; i < R; ++i)
        if ((*table)[expert_id.ints()[i]]->view().down.num_inputs != out.shape[1]) return false;
    py::gil_scoped_release release;
    const Spending spending(EXPERTS);
    kernels().expert_inner(sorted_call(*table, x.floats(), x.strides[0], row.ints(), expert_id.ints(), R, out.floats(),
                                     out.strides[0], nullptr, 1));
    return true;
}

inline bool call_choose_slices(py::handle activations_, py::handle expert_ids_, py::handle weights_, py::handle slopes_,
                        py::handle offsets_, py::handle tiers_, py::handle masks_, py::handle dropped_) {
    Argument activations, ids, weights, slopes, offsets, tiers, masks, dropped;
    if (!read(activations_, activations) || !read(expert_ids_, ids) || !read(weights_, weights) ||
        !read(slopes_, slopes) || !read(offsets_, offsets) || !read(tiers_, tiers) || !read(masks_, masks) ||
        !read(dropped_, dropped) || !activations.is_dense(FLOAT32, 2) || !ids.is_dense(INT32, 2) ||
        !weights.is_dense(FLOAT32, 2) || !slopes.is_dense(FLOAT32, 2) || !offsets.is_dense(FLOAT32, 2) ||
        !tiers.is_dense(INT32, 1) || !masks.is_dense(INT32, 2) || !dropped.is_dense(FLOAT32, 1))
        return false;
    const int64_t T = ids.shape[0], K = ids.shape[1], E = slopes.shape[0], N = slopes.shape[1];
    const int64_t columns = activations.shape[1];
    if (N < 1 || N > 8 || columns % N || activations.shape[0] != T * K || weights.shape[0] != T || weights.shape[1] != K ||
        offsets.shape[0] != E || offsets.shape[1] != N || tiers.shape[0] != T || masks.shape[0] != T ||
        masks.shape[1] != K || dropped.shape[0] != T)
        return false;
    check_range("expert_ids", ids.ints(), T * K, 0, E);
    py::gil_scoped_release release;
    const Spending spending(EXPERTS);
    choose_slices({activations.floats(), columns / N, columns, ids.ints(), weights.floats(), slopes.floats(), offsets.floats(), T, K,
                   N, tiers.ints(), masks.ints(), dropped.floats()});
    return true;
}

// experts, with masks [T, K] of the slices that run. Returns whether `hidden` is finite after it, or None if an argument does
// not fit.
inline py::object call_sliced_experts(py::handle x_, py::handle expert_ids_, py::handle weights_, py::handle masks_,
                               int64_t parts, const Bank& bank, py::handle hidden_, py::handle expert_out_) {
    Argument x, ids, weights, masks, hidden, out;
    if (!read(x_, x) || !read(expert_ids_, ids) || !read(weights_, weights) || !read(masks_, masks) ||
        !read(hidden_, hidden) || !read(expert_out_, out) || !ids.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) ||
        !masks.is_dense(INT32, 2) || !x.is_rows(bank.D()) || !hidden.is_rows(bank.D()) || !out.is_rows(bank.D()) ||
        parts < 1 || parts > 8)
        return py::none();
    const int64_t T = ids.shape[0], K = ids.shape[1];
    for (const Argument* each : {&weights, &masks})
        if (each->shape[0] != T || each->shape[1] != K) return py::none();
    if (x.shape[0] != T || hidden.shape[0] != T || out.shape[0] != T * K) return py::none();
    const auto table = bank.table();
    if (!fits_parts(*table, ids.ints(), masks.ints(), T * K, parts)) return py::none();
    bool is_finite;
    {
        py::gil_scoped_release release;
        const Spending spending(EXPERTS);
        is_finite = run_and_combine(kernels(), *table, x.floats(), x.strides[0], ids.ints(), weights.floats(), T, K, bank.D(),
                                    hidden.floats(), hidden.strides[0], out.floats(), out.strides[0], masks.ints(), parts);
    }
    return py::bool_(is_finite);
}

// expert_inner of a bank of gate neurons, then choose_slices.
inline bool call_choose_by_neurons(py::handle x_, py::handle expert_ids_, py::handle weights_, const Bank& neurons,
                            py::handle slopes_, py::handle offsets_, py::handle tiers_, py::handle masks_,
                            py::handle dropped_) {
    Argument x, ids, weights, slopes, offsets, tiers, masks, dropped;
    if (!read(x_, x) || !read(expert_ids_, ids) || !read(weights_, weights) || !read(slopes_, slopes) ||
        !read(offsets_, offsets) || !read(tiers_, tiers) || !read(masks_, masks) || !read(dropped_, dropped) ||
        !x.is_rows(neurons.D()) || !ids.is_dense(INT32, 2) || !weights.is_dense(FLOAT32, 2) ||
        !slopes.is_dense(FLOAT32, 2) || !offsets.is_dense(FLOAT32, 2) || !tiers.is_dense(INT32, 1) ||
        !masks.is_dense(INT32, 2) || !dropped.is_dense(FLOAT32, 1))
        return false;
    const int64_t T = ids.shape[0], K = ids.shape[1], E = slopes.shape[0], N = slopes.shape[1];
    for (const Argument* each : {&weights, &masks})
        if (each->shape[0] != T || each->shape[1] != K) return false;
    if (N < 1 || N > 8 || x.shape[0] != T || offsets.shape[0] != E || offsets.shape[1] != N || tiers.shape[0] != T ||
        dropped.shape[0] != T)
        return false;
    const auto table = neurons.table();
    check_range("expert_ids", ids.ints(), T * K, 0, E);
    check_resident(*table, ids.ints(), T * K);
    for (int64_t i = 0; i < T * K; ++i)
        if ((*table)[ids.ints()[i]]->view().down.num_inputs % N) return false;
    py::gil_scoped_release release;
    const Spending spending(EXPERTS);
    choose_by_neurons(kernels(), *table, x.floats(), x.strides[0],
                      {nullptr, 0, 0, ids.ints(), weights.floats(), slopes.floats(), offsets.floats(), T, K, N,
                       tiers.ints(), masks.ints(), dropped.floats()});
    return true;
}

}  // namespace edge
