// Exact search for a placement within a capacity.
//
// Only *stable* placements are searched: every buffer rests on the ground or on another one that lives at the same
// time (the placement with the least sum of offsets is stable). The tops of what is placed form a skyline over the
// sections. Its lowest stretches between walls are niches: whatever comes to lie below the walls lies within the niche, so either some
// buffer rests on its ground, and one of them is the leftmost, or the whole niche is waste up to the lower wall. These
// cases exclude each other, hence no placement is visited twice, whichever niche is branched on.
#pragma once
#include <cstring>

#include "layout_problem.h"

namespace layout {

enum class Outcome { infeasible = 0, found = 1, limit = 2 };

struct Strategy {
    int key = 0;          // which buffers are tried first: by area, size or lifetime
    bool lowest = false;  // branch on the lowest niche instead of the one with the fewest cases
    double noise = 0.0;   // relative noise on the keys
    uint64_t seed = 0;
};

// States known to have no solution: a fixed-size table, the newest entry wins.
class Memo {
  public:
    explicit Memo(int bits) : mask_((size_t{1} << bits) - 1), keys_(size_t{1} << bits) {}
    bool holds(uint64_t a, uint64_t b) const {
        const auto& k = keys_[a & mask_];
        return k.first == a && k.second == b;
    }
    void add(uint64_t a, uint64_t b) { keys_[a & mask_] = {a, b}; }

  private:
    size_t mask_;
    std::vector<std::pair<uint64_t, uint64_t>> keys_;
};

inline uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

template <typename T>
class Search {
  public:
    Search(const Problem& problem, T capacity, const Strategy& strategy, int64_t max_nodes, const Deadline& deadline,
           Memo& memo)
        : p_(problem), capacity_(capacity), strategy_(strategy), max_nodes_(max_nodes), deadline_(deadline), memo_(memo),
          size_(problem.n), offset_(problem.n, 0), rank_(problem.n), sorted_(problem.n), sum_(problem.sections + 1), high_(problem.sections + 1), small_(problem.sections + 1),
          acc_(problem.sections + 1), minoff_(problem.n) {
        for (int i = 0; i < p_.n; ++i) size_[i] = static_cast<T>(p_.size[i]);
        std::iota(sorted_.begin(), sorted_.end(), 0);
        std::sort(sorted_.begin(), sorted_.end(), [&](int a, int b) {
            if (p_.lo[a] != p_.lo[b]) return p_.lo[a] < p_.lo[b];
            if (p_.hi[a] != p_.hi[b]) return p_.hi[a] > p_.hi[b];
            if (p_.size[a] != p_.size[b]) return p_.size[a] > p_.size[b];
            return a < b;
        });
        rank();
    }

    Outcome run() {
        std::vector<int> items;
        for (int i : sorted_)
            if (size_[i] > 0) items.push_back(i);
        if (items.empty()) return Outcome::found;
        std::vector<T> ground(p_.sections, 0);
        return split(items.data(), static_cast<int>(items.size()), ground.data(), capacity_);
    }

    int64_t nodes() const { return nodes_; }
    const std::vector<T>& offsets() const { return offset_; }

    static constexpr int kMaxDepth = 60000;
    static constexpr size_t kStackPerLevel = 2048;  // three frames take about 500 bytes
    static constexpr size_t kMaxHeld = size_t{512} << 20;

  private:
    // One way to go on in a niche: `item` is the leftmost (or rightmost) that rests on its ground; -1 leaves it empty.
    struct Case {
        int item;
        T waste;  // ground raised beside the item
        int rank;
    };
    struct Niche {
        int begin, end;
        T ground, left, right;  // walls; `wall()` at the borders
    };
    static constexpr T wall() { return std::numeric_limits<T>::max() / 2; }

    void rank() {
        Rng rng(strategy_.seed);
        std::vector<double> key(p_.n);
        for (int i = 0; i < p_.n; ++i) {
            const double length = p_.hi[i] - p_.lo[i], size = static_cast<double>(p_.size[i]);
            const double k = strategy_.key == 0 ? length * size : strategy_.key == 1 ? size : length;
            key[i] = k * (1.0 + strategy_.noise * (rng.uniform() * 2 - 1));
        }
        std::vector<int> order(sorted_);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key[a] > key[b]; });
        for (int r = 0; r < p_.n; ++r) rank_[order[r]] = r;
    }

    // What one level of the recursion holds, at most.
    struct Level {
        Search& search;
        size_t bytes;
        Level(Search& s, size_t items, size_t sections)
            : search(s), bytes(2 * sections * sizeof(T) + 4 * items * sizeof(int)) {
            ++search.depth_;
            search.held_ += bytes;
        }
        ~Level() {
            --search.depth_;
            search.held_ -= bytes;
        }
    };

    bool out_of_budget() {
        if (stopped_) return true;
        if (depth_ > kMaxDepth || held_ > kMaxHeld) stopped_ = true;
        if (nodes_ >= max_nodes_) stopped_ = true;
        if (work_ > 20000) {
            work_ = 0;
            if (deadline_.passed()) stopped_ = true;
        }
        return stopped_;
    }

    // Sort out buffers that span all of a part (they may lie on top of everything else: what is above them can drop by
    // their size), and solve parts apart where no buffer crosses the border between two sections.
    Outcome split(const int* items, int count, const T* height, T capacity) {
        struct Part {
            int first, count, begin, end;
        };
        std::vector<Part> parts;
        for (int i = 0; i < count;) {
            Part part{i, 0, p_.lo[items[i]], p_.hi[items[i]]};
            while (i < count && p_.lo[items[i]] < part.end) part.end = std::max(part.end, p_.hi[items[i++]]);
            part.count = i - part.first;
            parts.push_back(part);
        }
        // Short parts fail or succeed fast.
        std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.count < b.count; });
        bool limited = false;
        for (const Part& part : parts) {
            const Outcome outcome = reduce(items + part.first, part.count, part.begin, part.end, height, capacity);
            if (outcome == Outcome::infeasible) return outcome;
            if (outcome == Outcome::limit) {
                limited = true;
                if (stopped_) return Outcome::limit;
            }
        }
        return limited ? Outcome::limit : Outcome::found;
    }

    Outcome reduce(const int* items, int count, int begin, int end, const T* height, T capacity) {
        std::vector<int> rest;
        rest.reserve(count);
        for (int k = 0; k < count; ++k) {
            const int i = items[k];
            if (p_.lo[i] == begin && p_.hi[i] == end) {
                capacity -= size_[i];
                offset_[i] = capacity;
            } else {
                rest.push_back(i);
            }
        }
        if (static_cast<int>(rest.size()) == count) return branch(rest, begin, end, height, capacity);
        if (capacity < *std::max_element(height + begin, height + end)) return Outcome::infeasible;
        if (rest.empty()) return Outcome::found;
        return split(rest.data(), static_cast<int>(rest.size()), height, capacity);
    }

    // Raise the skyline to what the unplaced buffers can use, and check per section and height that what must lie
    // above it fits. False: no solution.
    bool bound(const std::vector<int>& items, int begin, int end, const T* height, T* level, T capacity) {
        std::fill(level + begin, level + end, wall());
        std::fill(sum_.begin() + begin, sum_.begin() + end, T{0});
        for (int i : items) {
            T m = 0;
            for (int s = p_.lo[i]; s < p_.hi[i]; ++s) m = std::max(m, height[s]);
            minoff_[i] = m;
            for (int s = p_.lo[i]; s < p_.hi[i]; ++s) level[s] = std::min(level[s], m);
            for (int s = p_.lo[i]; s < p_.hi[i]; ++s) sum_[s] += size_[i];
        }
        for (int s = begin; s < end; ++s)
            if (level[s] + sum_[s] > capacity) return false;
        order_.assign(items.begin(), items.end());
        std::sort(order_.begin(), order_.end(), [&](int a, int b) { return minoff_[a] > minoff_[b]; });
        std::fill(acc_.begin() + begin, acc_.begin() + end, T{0});
        for (int i : order_) {
            T top = 0;
            for (int s = p_.lo[i]; s < p_.hi[i]; ++s) {
                acc_[s] += size_[i];
                top = std::max(top, acc_[s]);
            }
            if (minoff_[i] + top > capacity) return false;
        }
        return true;
    }

    // The cases of a niche. `mirrored` asks for the rightmost buffer instead of the leftmost.
    void cases(const Niche& niche, const std::vector<int>& inside, T capacity, bool mirrored, std::vector<Case>& out) {
        out.clear();
        // By section t: of the stretch between the near wall and t, the largest load still to place, and the smallest
        // buffer that lies within it.
        const int first = niche.begin, last = niche.end;
        std::fill(small_.begin() + first, small_.begin() + last + 1, wall());
        for (int i : inside) {
            T& small = small_[mirrored ? p_.lo[i] : p_.hi[i]];
            small = std::min(small, size_[i]);
        }
        if (mirrored) {
            high_[last] = 0;
            for (int t = last - 1; t >= first; --t) {
                high_[t] = std::max(high_[t + 1], sum_[t]);
                small_[t] = std::min(small_[t], small_[t + 1]);
            }
        } else {
            high_[first] = 0;
            for (int t = first + 1; t <= last; ++t) {
                high_[t] = std::max(high_[t - 1], sum_[t - 1]);
                small_[t] = std::min(small_[t], small_[t - 1]);
            }
        }
        // The stretch can be raised if what is left still fits and no buffer would have fitted below.
        const auto may_waste = [&](int t, T raise) {
            return niche.ground + raise + high_[t] <= capacity && small_[t] > raise;
        };
        const T near = mirrored ? niche.right : niche.left;
        const int border = mirrored ? last : first;
        int previous = -1;
        for (int i : inside) {
            const bool same = previous >= 0 && p_.lo[i] == p_.lo[previous] && p_.hi[i] == p_.hi[previous] &&
                              size_[i] == size_[previous];
            previous = i;
            if (same) continue;  // interchangeable
            const int t = mirrored ? p_.hi[i] : p_.lo[i];
            const T raise = t == border ? 0 : std::min<T>(near - niche.ground, size_[i]);
            if (t == border || may_waste(t, raise)) out.push_back({i, raise, rank_[i]});
        }
        const T lower = std::min(niche.left, niche.right) - niche.ground;
        if (lower + niche.ground < wall() && may_waste(mirrored ? first : last, lower)) out.push_back({-1, lower, p_.n});
    }

    Outcome branch(const std::vector<int>& items, int begin, int end, const T* height, T capacity) {
        ++nodes_;
        work_ += static_cast<int64_t>(items.size() + end - begin);
        const Level here(*this, items.size(), end - begin);
        if (out_of_budget()) return Outcome::limit;
        std::vector<T> storage(end - begin);
        T* level = storage.data() - begin;
        if (!bound(items, begin, end, height, level, capacity)) return Outcome::infeasible;

        const T base = *std::min_element(level + begin, level + end);
        uint64_t a = mix(static_cast<uint64_t>(capacity - base) + 0x51ull), b = mix(a ^ 0xABCDEFull);
        for (int i : items) {
            a += mix(i + 1);
            b += mix(i + 0x100000001ull);
        }
        for (int s = begin; s < end; ++s) {
            const uint64_t v = mix((static_cast<uint64_t>(s) << 40) ^ static_cast<uint64_t>(level[s] - base));
            a += v * 0x9E3779B97F4A7C15ull;
            b += mix(v + 77);
        }
        a = mix(a);
        if (memo_.holds(a, b)) return Outcome::infeasible;

        std::vector<Case> best, now;
        Niche chosen{};
        bool mirrored = false, have = false;
        std::vector<int> inside;
        for (int s = begin; s < end;) {
            int e = s + 1;
            while (e < end && level[e] == level[s]) ++e;
            Niche niche{s, e, level[s], s == begin ? wall() : level[s - 1], e == end ? wall() : level[e]};
            s = e;
            if (niche.left < niche.ground || niche.right < niche.ground) continue;
            if (have && strategy_.lowest && niche.ground >= chosen.ground) continue;
            inside.clear();
            for (int i : items)
                if (p_.lo[i] >= niche.begin && p_.hi[i] <= niche.end) inside.push_back(i);
            for (int side = 0; side < 2; ++side) {
                cases(niche, inside, capacity, side == 1, now);
                if (now.empty()) {
                    memo_.add(a, b);
                    return Outcome::infeasible;
                }
                const bool better = !have || now.size() < best.size() || (strategy_.lowest && niche.ground < chosen.ground);
                if (better) {
                    have = true;
                    chosen = niche;
                    mirrored = side == 1;
                    best.swap(now);
                }
            }
        }
        std::sort(best.begin(), best.end(), [&](const Case& x, const Case& y) {
            if ((x.waste > 0) != (y.waste > 0)) return y.waste > 0;  // without waste first
            return x.rank < y.rank;
        });
        std::vector<T> child_storage(end - begin);
        T* child = child_storage.data() - begin;
        std::vector<int> left;
        bool limited = false;
        for (const Case& c : best) {
            std::memcpy(child + begin, level + begin, sizeof(T) * (end - begin));
            left.clear();
            if (c.item < 0) {
                for (int s = chosen.begin; s < chosen.end; ++s) child[s] += c.waste;
                left = items;
            } else {
                const int lo = p_.lo[c.item], hi = p_.hi[c.item];
                if (mirrored)
                    for (int s = hi; s < chosen.end; ++s) child[s] += c.waste;
                else
                    for (int s = chosen.begin; s < lo; ++s) child[s] += c.waste;
                for (int s = lo; s < hi; ++s) child[s] += size_[c.item];
                for (int i : items)
                    if (i != c.item) left.push_back(i);
                offset_[c.item] = chosen.ground;
            }
            const Outcome outcome = split(left.data(), static_cast<int>(left.size()), child, capacity);
            if (outcome == Outcome::found) return outcome;
            if (outcome == Outcome::limit) {
                limited = true;
                if (stopped_) return outcome;
            }
        }
        if (limited) return Outcome::limit;
        memo_.add(a, b);
        return Outcome::infeasible;
    }

    const Problem& p_;
    T capacity_;
    Strategy strategy_;
    int64_t max_nodes_, nodes_ = 0;
    int64_t work_ = 0;  // since the clock was read
    int depth_ = 0;
    size_t held_ = 0;
    const Deadline& deadline_;
    Memo& memo_;
    bool stopped_ = false;
    std::vector<T> size_, offset_;
    std::vector<int> rank_, sorted_, order_;
    std::vector<T> sum_, high_, small_, acc_, minoff_;
};

}  // namespace layout
