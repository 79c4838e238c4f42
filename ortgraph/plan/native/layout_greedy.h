// Greedy placement in a given order, and a search over orders.
#pragma once
#include "layout_problem.h"

namespace layout {

struct Span {
    int64_t low, high;
};

// Disjoint occupied offsets, ascending; spans that touch are joined.
class Spans {
  public:
    void clear() { spans_.clear(); }
    const std::vector<Span>& all() const { return spans_; }

    // Gaps below `least`, which nothing that follows can use, are closed.
    void add(int64_t low, int64_t high, int64_t least) {
        const int64_t reach = std::max<int64_t>(least - 1, 0);
        auto first = std::lower_bound(spans_.begin(), spans_.end(), low - reach,
                                      [](const Span& s, int64_t v) { return s.high < v; });
        if (first == spans_.end()) {
            spans_.push_back({low, high});
            return;
        }
        if (first->low > high + reach) {
            spans_.insert(first, {low, high});
            return;
        }
        auto last = first;
        low = std::min(low, first->low);
        while (last != spans_.end() && last->low <= high + reach) high = std::max(high, (last++)->high);
        *first = {low, high};
        spans_.erase(first + 1, last);
    }

  private:
    std::vector<Span> spans_;
};

// A segment tree over the sections. Each node holds the offsets occupied by buffers that cover all of its sections, and
// those occupied in any of its sections. Packed buffers join to few spans, so that lists are short.
class Packer {
  public:
    explicit Packer(const Problem& problem) : p_(problem), offset_(problem.n, 0) {
        leaves_ = 1;
        while (leaves_ < std::max(1, p_.sections)) leaves_ *= 2;
        covered_.resize(2 * leaves_);
        touched_.resize(2 * leaves_);
    }

    // Places all buffers in this order, each in the lowest (or tightest) gap. Returns the arena, -1 past the deadline.
    int64_t place(const std::vector<int>& order, bool tightest, const Deadline& deadline) {
        for (auto& s : covered_) s.clear();
        for (auto& s : touched_) s.clear();
        std::vector<int64_t> least(order.size() + 1, std::numeric_limits<int64_t>::max() / 4);
        for (size_t k = order.size(); k-- > 0;)
            least[k] = p_.size[order[k]] > 0 ? std::min(least[k + 1], p_.size[order[k]]) : least[k + 1];
        int64_t total = 0;
        for (size_t k = 0; k < order.size(); ++k) {
            const int i = order[k];
            if (k % 256 == 255 && deadline.passed()) return -1;
            least_ = least[k + 1];
            if (p_.size[i] == 0) {
                offset_[i] = 0;
                continue;
            }
            gather(p_.lo[i], p_.hi[i]);
            const int64_t at = tightest ? tightest_gap(p_.size[i]) : lowest_gap(p_.size[i]);
            offset_[i] = at;
            occupy(p_.lo[i], p_.hi[i], at, at + p_.size[i]);
            total = std::max(total, at + p_.size[i]);
        }
        return total;
    }

    const std::vector<int64_t>& offsets() const { return offset_; }

  private:
    struct Cursor {
        const Span *at, *end;
    };

    void gather(int lo, int hi) {
        lists_.clear();
        int l = lo + leaves_, r = hi + leaves_;
        for (int node = l >> 1; node >= 1; node >>= 1) push(covered_[node]);
        // Ancestors of the last section that are not ancestors of the first.
        for (int node = (r - 1) >> 1, other = l >> 1; node != other; node >>= 1, other >>= 1) push(covered_[node]);
        for (; l < r; l >>= 1, r >>= 1) {
            if (l & 1) push(touched_[l++]);
            if (r & 1) push(touched_[--r]);
        }
    }

    void push(const Spans& spans) {
        const auto& all = spans.all();
        if (!all.empty()) lists_.push_back({all.data(), all.data() + all.size()});
    }

    // Moves `at` up to the first free offset at or above it; `end` becomes the end of that gap. Lists advance with it.
    void next_gap(int64_t& at, int64_t& end) {
        bool moved = true;
        while (moved) {
            moved = false;
            end = std::numeric_limits<int64_t>::max();
            for (Cursor& c : lists_) {
                while (c.at != c.end && c.at->high <= at) ++c.at;
                if (c.at == c.end) continue;
                if (c.at->low <= at) {
                    at = c.at->high;
                    ++c.at;
                    moved = true;
                    if (c.at == c.end) continue;
                }
                end = std::min(end, c.at->low);
            }
        }
    }

    int64_t lowest_gap(int64_t size) {
        int64_t at = 0, end = 0;
        for (;; at = end) {
            next_gap(at, end);
            if (end - at >= size) return at;
        }
    }

    int64_t tightest_gap(int64_t size) {
        int64_t at = 0, end = 0, best = -1, room = std::numeric_limits<int64_t>::max();
        for (;; at = end) {
            next_gap(at, end);
            if (end == std::numeric_limits<int64_t>::max()) return best < 0 ? at : best;
            if (end - at >= size && end - at < room) {
                best = at;
                room = end - at;
            }
        }
    }

    void occupy(int lo, int hi, int64_t low, int64_t high) {
        const int l = lo + leaves_, r = hi + leaves_;
        for (int a = l, b = r; a < b; a >>= 1, b >>= 1) {
            if (a & 1) cover(a++, low, high);
            if (b & 1) cover(--b, low, high);
        }
        // Every parent of a covered node is a parent of the first or of the last section.
        int a = l >> 1, b = (r - 1) >> 1;
        for (; a != b; a >>= 1, b >>= 1) {
            touched_[a].add(low, high, least_);
            touched_[b].add(low, high, least_);
        }
        for (; a >= 1; a >>= 1) touched_[a].add(low, high, least_);
    }

    void cover(int node, int64_t low, int64_t high) {
        covered_[node].add(low, high, least_);
        touched_[node].add(low, high, least_);
    }

    const Problem& p_;
    int leaves_;
    int64_t least_ = 0;  // smallest size still to place
    std::vector<int64_t> offset_;
    std::vector<Spans> covered_, touched_;
    std::vector<Cursor> lists_;
};

}  // namespace layout
