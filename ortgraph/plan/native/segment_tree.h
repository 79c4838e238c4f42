// Adds over ranges, maximum over everything: the incremental peak of a schedule. Header only, no dependency.
//
//     MaxTree live(slots);              // slots 0 .. slots - 1, all 0
//     live.add(birth, death + 1, size);  // a block of memory lives during steps birth .. death; logarithmic
//     live.add(birth, death + 1, -size); // and taken out again
//     live.peak();                       // largest sum of live bytes; constant time
//     live.first_peak();                 // the earliest slot at which it is reached
//     live.max(lower, upper), live.at(slot), live.assign(values, n)
//
// To move an operation, do not shift the steps behind it. Give the sequence more slots than operations and leave empty
// slots between them: a value that lives across an empty slot lives in the step before it as well, so empty slots never
// set the peak, and a move is a handful of adds (outputs of the operation, inputs whose last reader changes). When the
// slots at a place are used up, spread the sequence again and call assign(). Undo a refused move by the opposite adds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

class MaxTree {
   public:
    explicit MaxTree(int slots = 0) { resize(slots); }

    // All slots 0.
    void resize(int slots) {
        slots_ = slots;
        width_ = 1;
        while (width_ < slots) width_ *= 2;
        best_.assign(2 * static_cast<size_t>(width_), 0);
        added_.assign(width_, 0);
        for (int i = slots; i < width_; ++i) best_[width_ + i] = kNone;
        for (int i = width_ - 1; i > 0; --i) best_[i] = std::max(best_[2 * i], best_[2 * i + 1]);
    }

    // Slot i gets values[i]; linear time.
    void assign(const int64_t* values, int slots) {
        if (slots != slots_) resize(slots);
        std::copy(values, values + slots, best_.begin() + width_);
        std::fill(added_.begin(), added_.end(), 0);
        for (int i = width_ - 1; i > 0; --i) best_[i] = std::max(best_[2 * i], best_[2 * i + 1]);
    }

    // Adds to every slot of [lower, upper).
    void add(int lower, int upper, int64_t amount) {
        if (lower >= upper) return;
        // Walks both borders up; a parent is refreshed as soon as nothing below it changes any more.
        int left = lower + width_, right = upper - 1 + width_;
        best_[left] += amount;
        if (left != right) best_[right] += amount;
        // Borders are inside the range; siblings between them are whole.
        while ((left >> 1) != (right >> 1)) {
            if (!(left & 1)) whole(left + 1, amount);
            if (right & 1) whole(right - 1, amount);
            left >>= 1, right >>= 1;
            refresh(left);
            refresh(right);
        }
        for (left >>= 1; left > 0; left >>= 1) refresh(left);
    }

    int64_t peak() const { return best_[1]; }
    int slots() const { return slots_; }

    // Earliest slot whose value is peak().
    int first_peak() const {
        int node = 1;
        while (node < width_) node = 2 * node + (best_[2 * node] < best_[2 * node + 1]);
        return node - width_;
    }

    int64_t at(int slot) const {
        int node = slot + width_;
        int64_t value = best_[node];
        for (node >>= 1; node > 0; node >>= 1) value += added_[node];
        return value;
    }

    // Largest value in [lower, upper), which must not be empty.
    int64_t max(int lower, int upper) const {
        int left = lower + width_, right = upper - 1 + width_;
        int64_t on_left = best_[left], on_right = best_[right];
        while ((left >> 1) != (right >> 1)) {
            if (!(left & 1)) on_left = std::max(on_left, best_[left + 1]);
            if (right & 1) on_right = std::max(on_right, best_[right - 1]);
            left >>= 1, right >>= 1;
            on_left += added_[left];
            on_right += added_[right];
        }
        int64_t value = std::max(on_left, on_right);
        for (left >>= 1; left > 0; left >>= 1) value += added_[left];
        return value;
    }

   private:
    static constexpr int64_t kNone = INT64_MIN / 4;  // Padding; far below any sum of bytes.

    void whole(int node, int64_t amount) {
        best_[node] += amount;
        if (node < width_) added_[node] += amount;
    }
    void refresh(int node) { best_[node] = std::max(best_[2 * node], best_[2 * node + 1]) + added_[node]; }

    int slots_ = 0, width_ = 1;
    std::vector<int64_t> best_, added_;  // best_[node]: largest sum below it, its own added_ included.
};
