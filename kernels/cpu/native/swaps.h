// Swap search over a partition of neurons. Included by an ISA unit inside its own anonymous namespace.
// Defined by kernels/reference/swap_search.py.

// The sum of the `dropped` smallest of N loads, lane by lane.
template <int N>
inline V smallest_sum(V* load, int dropped) {
    V sum = zero();
    for (int pass = 0; pass < dropped; ++pass) {  // each pass carries the smallest that is left to the front
#pragma GCC unroll 8
        for (int i = N - 1; i > 0; --i) {
            if (i <= pass) break;
            const V low = min(load[i - 1], load[i]), high = max(load[i - 1], load[i]);
            load[i - 1] = low;
            load[i] = high;
        }
        sum = add(sum, load[pass]);
    }
    return sum;
}

template <int N>
void swap_search_of(const SwapCall& call) {
    const int64_t B = call.B;
    const size_t group_bytes = (size_t)call.F * sizeof(int32_t);
    float *cost = call.costs, *changed = call.costs + B;
    double now = 0.0;
    for (int64_t b = 0; b < B; b += 16) {
        V each[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) each[n] = load(call.loads + n * B + b);
        const V value = smallest_sum<N>(each, call.dropped);
        store(cost + b, value);
        now += lane_sum(value);
    }
    double best = now;
    bool best_is_now = true;
    call.objective[0] = now;
    for (int64_t i = 0; i < call.I; ++i) {
        const int32_t j = call.first[i], k = call.second[i], from = call.group[j], to = call.group[k];
        call.changes[i] = 0.0f;
        if (from == to) continue;
        const float *mass_j = call.mass + j * B, *mass_k = call.mass + k * B;
        const float* other[N];  // the sum does not depend on the order of the loads
        for (int n = 0, m = 0; n < N; ++n)
            if (n != from && n != to) other[m++] = call.loads + n * B;
        float *load_from = call.loads + from * B, *load_to = call.loads + to * B;
        V total = zero();
        for (int64_t b = 0; b < B; b += 16) {
            const V moved = sub(load(mass_k + b), load(mass_j + b));
            V each[N];
            each[0] = add(load(load_from + b), moved);
            each[1] = sub(load(load_to + b), moved);
#pragma GCC unroll 8
            for (int n = 2; n < N; ++n) each[n] = load(other[n - 2] + b);
            const V value = smallest_sum<N>(each, call.dropped);
            store(changed + b, value);
            total = add(total, sub(value, load(cost + b)));
        }
        const float change = lane_sum(total);
        call.changes[i] = change;
        if (!(change < call.tolerances[i])) continue;
        if (best_is_now && !(change < 0.0f)) {  // away from the best so far, which is kept
            __builtin_memcpy(call.best_group, call.group, group_bytes);
            best_is_now = false;
        }
        for (int64_t b = 0; b < B; b += 16) {
            const V moved = sub(load(mass_k + b), load(mass_j + b));
            store(load_from + b, add(load(load_from + b), moved));
            store(load_to + b, sub(load(load_to + b), moved));
        }
        float* was = cost;
        cost = changed;
        changed = was;
        call.group[j] = to;
        call.group[k] = from;
        now += change;
        if (now < best) {
            best = now;
            best_is_now = true;
        }
    }
    if (best_is_now) __builtin_memcpy(call.best_group, call.group, group_bytes);
    call.objective[1] = best;
}

void swap_search(const SwapCall& call) {
    switch (call.N) {
        case 2: swap_search_of<2>(call); break;
        case 3: swap_search_of<3>(call); break;
        case 4: swap_search_of<4>(call); break;
        case 5: swap_search_of<5>(call); break;
        case 6: swap_search_of<6>(call); break;
        case 7: swap_search_of<7>(call); break;
        case 8: swap_search_of<8>(call); break;
    }
}
