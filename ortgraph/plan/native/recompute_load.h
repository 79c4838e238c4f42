// Live bytes by slot, with range addition, and the sum of bytes over a budget kept up to date.
#pragma once

#include <algorithm>
#include <vector>

namespace recompute {

// Blocks of slots carry a pending addition, their largest load and their excess. A range addition touches single slots
// only in the two blocks at its ends and in blocks that are over the budget before or after it, so it costs little
// even where values live through most of a long sequence. Loads are whole numbers below 2^53, exact in a double.
class Load {
 public:
  static constexpr int kBlock = 64;
  static constexpr double kAbsent = 1125899906842624.0;  // 2^50; an empty slot is never over a budget

  void reset(int slots, double budget) {
    slots_ = (slots + kBlock - 1) / kBlock * kBlock;
    budget_ = budget;
    raw_.assign(slots_, -kAbsent);
    pending_.assign(slots_ / kBlock, 0.0);
    largest_.assign(slots_ / kBlock, -kAbsent);
    excess_.assign(slots_ / kBlock, 0.0);
    stale_.assign(slots_ / kBlock, 0);
    waiting_.clear();
    total_ = 0.0;
  }

  void set_budget(double budget) {
    budget_ = budget;
    for (int b = 0; b < blocks(); ++b) mark(b);
  }

  int slots() const { return slots_; }
  int blocks() const { return static_cast<int>(pending_.size()); }
  double budget() const { return budget_; }
  double excess() { return settle(), total_; }
  double block_excess(int b) { return settle(), excess_[b]; }
  double at(int slot) const { return raw_[slot] + pending_[slot / kBlock]; }

  double peak() { return settle(), *std::max_element(largest_.begin(), largest_.end()); }

  int peak_slot() {
    settle();
    const int b = static_cast<int>(std::max_element(largest_.begin(), largest_.end()) - largest_.begin());
    const double* raw = &raw_[b * kBlock];
    return b * kBlock + static_cast<int>(std::max_element(raw, raw + kBlock) - raw);
  }

  // First slot of block b that is over the budget, at or after a slot of the block; wraps around.
  int over_in_block(int b, int start) const {
    for (int k = 0; k < kBlock; ++k) {
      const int slot = b * kBlock + (start + k) % kBlock;
      if (at(slot) > budget_) return slot;
    }
    return -1;
  }

  // Adds to the slots first..last, both included.
  void add(int first, int last, double bytes) {
    if (first > last || bytes == 0.0) return;
    const int from = first / kBlock, to = last / kBlock;
    if (from == to) return part(from, first, last, bytes);
    part(from, first, from * kBlock + kBlock - 1, bytes);
    for (int b = from + 1; b < to; ++b) whole(b, bytes);
    part(to, to * kBlock, last, bytes);
  }

  // Whether bytes more would put some slot of first..last over the budget.
  bool over(int first, int last, double bytes) {
    settle();
    while (first <= last) {
      const int b = first / kBlock, stop = std::min(last, b * kBlock + kBlock - 1);
      const bool whole_block = first == b * kBlock && stop == b * kBlock + kBlock - 1;
      if (largest_[b] + bytes > budget_) {
        if (whole_block) return true;
        for (int s = first; s <= stop; ++s)
          if (at(s) + bytes > budget_) return true;
      }
      first = stop + 1;
    }
    return false;
  }

 private:
  void part(int b, int first, int last, double bytes) {
    double* raw = raw_.data();
    for (int s = first; s <= last; ++s) raw[s] += bytes;
    mark(b);
  }

  void whole(int b, double bytes) {
    pending_[b] += bytes;
    largest_[b] += bytes;
    if (largest_[b] > budget_ || excess_[b] > 0.0) mark(b);
  }

  // One edit changes a block several times: it is looked at when somebody asks.
  void mark(int b) {
    if (stale_[b]) return;
    stale_[b] = 1;
    waiting_.push_back(b);
  }

  void settle() {
    for (int b : waiting_) scan(b), stale_[b] = 0;
    waiting_.clear();
  }

  void scan(int b) {
    const double* raw = &raw_[b * kBlock];
    const double room = budget_ - pending_[b];
    double largest[8], excess[8] = {};
    for (int j = 0; j < 8; ++j) largest[j] = raw[j];
    for (int k = 0; k < kBlock; k += 8) {
      for (int j = 0; j < 8; ++j) {
        largest[j] = std::max(largest[j], raw[k + j]);
        excess[j] += std::max(raw[k + j] - room, 0.0);
      }
    }
    double top = largest[0], sum = 0.0;
    for (int j = 0; j < 8; ++j) top = std::max(top, largest[j]), sum += excess[j];
    largest_[b] = top + pending_[b];
    total_ += sum - excess_[b];
    excess_[b] = sum;
  }

  int slots_ = 0;
  double budget_ = 0.0, total_ = 0.0;
  std::vector<double> raw_, pending_, largest_, excess_;
  std::vector<unsigned char> stale_;
  std::vector<int> waiting_;  // blocks whose largest load and excess are out of date
};

}  // namespace recompute
