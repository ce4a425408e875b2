// The gate's choice and its counts. Included by an ISA unit inside its own anonymous namespace.

constexpr float LEAST_SUM = 1e-20f;  // what weights are divided by at least

// Closes the experts of all groups but the best `top_groups`. A group counts by its best value, or by the sum of its best
// two; ties to the lowest group.
void close_groups(const float* pick, int64_t E, int64_t num_groups, int64_t top_groups, bool by_two, float* group_value,
                  char* closed) {
    const int64_t size = E / num_groups;
    for (int64_t g = 0; g < num_groups; ++g) {
        float best = -__builtin_inff(), second = best;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) {
            if (pick[i] > best) {
                second = best;
                best = pick[i];
            } else if (pick[i] > second) {
                second = pick[i];
            }
        }
        group_value[g] = by_two && size > 1 ? best + second : best;
    }
    __builtin_memset(closed, 1, (size_t)E);
    for (int64_t n = 0; n < top_groups; ++n) {
        int64_t best = -1;
        for (int64_t g = 0; g < num_groups; ++g)
            if (closed[g * size] && (best < 0 || group_value[g] > group_value[best])) best = g;
        __builtin_memset(closed + best * size, 0, (size_t)size);
    }
}

// Blocks that begin are set to 0, then each choice of a counted row adds 1.
void count_choices(const GateCall& call) {
    const auto row_of = [&](int64_t t) { return call.counts + call.slots[t] / 16 * call.counts_stride; };
    for (int64_t t = 0; t < call.T; ++t)
        if (call.slots[t] >= 0 && call.slots[t] % 16 == 0)
            __builtin_memset(row_of(t), 0, (size_t)(call.E * (call.counts_are_int8 ? 1 : 4)));
    for (int64_t t = 0; t < call.T; ++t) {
        if (call.slots[t] < 0 || !call.counted[t]) continue;
        const int32_t* id = call.ids + t * call.k;
        for (int64_t j = 0; j < call.k; ++j)
            if (call.counts_are_int8)
                ++((int8_t*)row_of(t))[id[j]];
            else
                ++((int32_t*)row_of(t))[id[j]];
    }
}

void gate_topk(const GateCall& call) {
    const int64_t E = call.E, k = call.k, blocks = parts_of(E, 16), padded = blocks * 16;
    const bool sigmoid = call.scores == SIGMOID, divided = call.scores == SOFTMAX;
    float* left = (float*)scratch(SMALL, (size_t)padded * 13);  // what decides, less what was chosen
    float* score = left + padded;
    float* group_value = score + padded;
    char* closed = (char*)(group_value + padded);  // chosen, or in a closed group
    const V lowest = set1(-__builtin_inff()), one = set1(1.0f);
    for (int64_t t = 0; t < call.T; ++t) {
        const float* row = call.logits + t * call.stride;
        V most = lowest;
        for (int64_t b = 0; b < blocks; ++b) {
            const int lanes = (int)at_most(16, E - 16 * b);
            V v = keep_first(load_part(row + 16 * b, lanes), lanes, lowest);
            store(left + 16 * b, v);
            most = max(v, most);
        }
        const V top = set1(lane_max(most));
        V total = zero();
        for (int64_t b = 0; b < blocks; ++b) {
            const int lanes = (int)at_most(16, E - 16 * b);
            V v = load(left + 16 * b);
            v = sigmoid ? div(one, add(one, exp_lanes(sub(zero(), v)))) : exp_lanes(sub(v, top));
            v = keep_first(v, lanes, zero());
            store(score + 16 * b, v);
            total = add(total, v);
        }
        const float sum = divided ? lane_sum(total) : 1.0f;
        if (call.selection_bias)  // it decides together with the score, which alone weighs
            for (int64_t b = 0; b < blocks; ++b) {
                const int lanes = (int)at_most(16, E - 16 * b);
                V v = add(div(load(score + 16 * b), set1(sum)), load_part(call.selection_bias + 16 * b, lanes));
                store(left + 16 * b, keep_first(v, lanes, lowest));
            }
        __builtin_memset(closed, 0, (size_t)E);
        if (call.num_groups > 1) {
            close_groups(left, E, call.num_groups, call.top_groups, call.selection_bias != nullptr, group_value, closed);
            for (int64_t i = 0; i < E; ++i)
                if (closed[i]) left[i] = -__builtin_inff();
        }
        int32_t* id = call.ids + t * k;
        float* weight = call.weights + t * k;
        float chosen_sum = 0.0f;
        for (int64_t j = 0; j < k; ++j) {
            V best = lowest;
            for (int64_t b = 0; b < blocks; ++b) best = max(load(left + 16 * b), best);
            const float value = lane_max(best);
            int64_t found = -1;
            if (value > -__builtin_inff())
                for (int64_t b = 0; b < blocks && found < 0; ++b) {
                    const unsigned mask = equal_mask(load(left + 16 * b), set1(value));
                    if (mask) found = 16 * b + __builtin_ctz(mask);
                }
            if (found < 0)  // only -inf and nan are left: the lowest id that is free
                for (found = 0; closed[found];) ++found;
            left[found] = -__builtin_inff();
            closed[found] = 1;
            id[j] = (int32_t)found;
            weight[j] = score[found] / sum;
            chosen_sum = chosen_sum + weight[j];
        }
        if (call.renormalise || call.scores == SOFTMAX_OF_TOP_K) {
            const float divisor = chosen_sum > LEAST_SUM ? chosen_sum : LEAST_SUM;
            for (int64_t j = 0; j < k; ++j) weight[j] = weight[j] / divisor;
        }
        for (int64_t j = 0; j < k; ++j) {
            weight[j] = weight[j] * call.scale;
            if (call.expert_scale) weight[j] = weight[j] * call.expert_scale[id[j]];
        }
    }
    if (call.counts) count_choices(call);
}
