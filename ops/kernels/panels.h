// Where a convolution over images with channels last finds its operands, and its weights in panels.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm_tile.h"
#include "turn.h"
#include "window.h"

namespace ortgraph {
namespace channels_last {

using gemm::Word;
constexpr std::int64_t kPanel = gemm::kColumns;  // results' channels that are worked on at once
constexpr std::int64_t kVectors = gemm::kVectors;
constexpr std::int64_t kWords = 128;             // of a dot product at once: their panel stays in the first cache

// Window positions along one axis, for results of one kind: those that see the same ones.
struct Tap {
  std::int64_t index, at;  // the pixel lies `at` behind the result's place
};

// One axis of the source with its padding, and where each result's window lies on it.
struct Axis {
  std::int64_t lead = 0, size = 0;  // zeros in front, and all elements
  std::vector<std::int64_t> place;
  std::vector<std::size_t> kind;
  std::vector<std::vector<Tap>> kinds;

  // Of Y over X.
  static Axis forward(std::int64_t out, std::int64_t step, std::int64_t window, std::int64_t spread,
                      std::int64_t lead) {
    Axis a;
    a.lead = lead, a.size = (out - 1) * step + (window - 1) * spread + 1;
    for (std::int64_t i = 0; i < out; ++i) a.place.push_back(i * step), a.kind.push_back(0);
    a.kinds.emplace_back();
    for (std::int64_t t = 0; t < window; ++t) a.kinds[0].push_back({t, t * spread});
    return a;
  }

  // Of dX over dY: results with the same rest of the stride see the window positions that have it.
  static Axis backward(std::int64_t size, std::int64_t step, std::int64_t window, std::int64_t spread,
                       std::int64_t lead) {
    Axis a;
    a.kinds.resize(static_cast<std::size_t>(step));
    for (std::int64_t t = window - 1; t >= 0; --t) {
      const std::int64_t behind = t * spread / step;
      a.kinds[static_cast<std::size_t>(t * spread % step)].push_back({t, -behind});
      a.lead = std::max(a.lead, behind);
    }
    for (std::int64_t i = 0; i < size; ++i) {
      a.place.push_back((i + lead) / step + a.lead);
      a.kind.push_back(static_cast<std::size_t>((i + lead) % step));
      a.size = std::max(a.size, a.place.back() + 1);
    }
    return a;
  }
};

// Words that lie side by side, counted from a pixel's place.
struct Run {
  std::int64_t from, words;
};

// What results of one kind are made of: taps in the order of their pixels, and these as runs, cut to blocks of kWords.
struct Kind {
  std::vector<std::int64_t> taps;
  std::vector<std::vector<Run>> blocks;
  std::int64_t words = 0, weights = 0;  // of a dot product; where the panels begin
};

// A whole product: geometry only.
class Plan {
 public:
  Plan(Axis y, Axis x, std::int64_t columns, std::int64_t in, std::int64_t out, std::int64_t depth)
      : y_(std::move(y)), x_(std::move(x)), in_(in), out_(out), pixel_((in + depth - 1) / depth) {
    for (const std::vector<Tap>& rows : y_.kinds) {
      for (const std::vector<Tap>& cells : x_.kinds) add(rows, cells, columns);
    }
  }

  const Axis& y() const { return y_; }
  const Axis& x() const { return x_; }
  std::int64_t in() const { return in_; }
  std::int64_t out() const { return out_; }
  std::int64_t lanes() const { return (out_ + kLanes - 1) / kLanes * kLanes; }
  std::int64_t pixel() const { return pixel_; }                             // words of one
  std::int64_t picture() const { return y_.size * x_.size * pixel_; }       // words of an image
  std::int64_t weights() const { return weights_; }                         // words of all panels
  std::int64_t rows() const { return static_cast<std::int64_t>(y_.place.size()); }
  std::int64_t columns() const { return static_cast<std::int64_t>(x_.place.size()); }
  const std::vector<Kind>& kinds() const { return kinds_; }
  std::size_t kind(std::size_t i, std::size_t j) const { return y_.kind[i] * x_.kinds.size() + x_.kind[j]; }
  std::int64_t place(std::size_t i, std::size_t j) const { return (y_.place[i] * x_.size + x_.place[j]) * pixel_; }

  // Where the words of a window position's channels go, 16 results from `lane` on, and from one to the next.
  struct Slot {
    std::int64_t at, step;
  };
  Slot slot(std::size_t kind, std::size_t tap, std::int64_t lane) const {
    const std::int64_t first = lane / kPanel * kPanel, width = std::min(kPanel, lanes() - first);
    const Kind& k = kinds_[kind];
    return {k.weights + first * k.words + static_cast<std::int64_t>(tap) * pixel_ * width + lane - first, width};
  }

 private:
  void add(const std::vector<Tap>& rows, const std::vector<Tap>& cells, std::int64_t columns) {
    Kind k;
    k.weights = weights_;
    std::int64_t room = 0, end = -1;
    for (const Tap& row : rows) {
      for (const Tap& cell : cells) {
        k.taps.push_back(row.index * columns + cell.index);
        std::int64_t from = (row.at * x_.size + cell.at) * pixel_;
        for (std::int64_t left = pixel_; left > 0;) {
          if (room == 0) k.blocks.emplace_back(), room = kWords, end = -1;
          const std::int64_t words = std::min(left, room);
          std::vector<Run>& runs = k.blocks.back();
          if (!runs.empty() && from == end) runs.back().words += words;
          else runs.push_back({from, words});
          from += words, end = from, left -= words, room -= words;
        }
      }
    }
    k.words = static_cast<std::int64_t>(k.taps.size()) * pixel_;
    weights_ += k.words * lanes();
    kinds_.push_back(std::move(k));
  }

  Axis y_, x_;
  std::int64_t in_, out_, pixel_, weights_ = 0;
  std::vector<Kind> kinds_;
};

// Panels from W [filters, channels, taps], for Y: the filters are the results.
template <class Arithmetic, class T>
void pack_filters(const Context& context, const T* w, std::int64_t taps, const Plan& plan, bool round, Word* to) {
  constexpr std::int64_t kDepth = Arithmetic::kDepth;
  const std::int64_t c = plan.in(), f = plan.out();
  const std::int64_t chunk = std::min((c + kDepth - 1) / kDepth * kDepth, std::max<std::int64_t>(256 / taps / 2 * 2, 2));
  const std::int64_t chunks = (c + chunk - 1) / chunk, groups = plan.lanes() / kLanes;
  const std::vector<std::int64_t>& order = plan.kinds()[0].taps;
  context.rows(groups * chunks, chunk * taps * kLanes, [&](std::int64_t begin, std::int64_t end) {
    float* const lines = kept(Place::kLocal, (chunk * taps + kLanes) * kLanes);
    for (std::int64_t part = begin; part < end; ++part) {
      const std::int64_t lane = part / chunks * kLanes, first = part % chunks * chunk;
      const std::int64_t count = std::min(chunk, c - first), numbers = count * taps;
      for (std::int64_t j = 0; j < numbers; j += kLanes) {
        const int n = static_cast<int>(std::min<std::int64_t>(kLanes, numbers - j));
        V rows[kLanes] = {};
        for (std::int64_t r = 0; r < std::min<std::int64_t>(kLanes, f - lane); ++r) {
          const T* from = w + ((lane + r) * c + first) * taps + j;
          rows[r] = n == kLanes ? load(from, Full{}) : load(from, Part{n});
        }
        turned(rows);
        for (int r = 0; r < kLanes; ++r) store(lines + (j + r) * kLanes, rows[r], Full{});
      }
      for (std::size_t t = 0; t < order.size(); ++t) {
        const Plan::Slot slot = plan.slot(0, t, lane);
        for (std::int64_t i = 0; i < count; i += kDepth) {
          const float* from = lines + (i * taps + order[t]) * kLanes;
          const V odd = i + 1 < count ? load(from + taps * kLanes, Full{}) : V{};
          store_words(to + slot.at + (first + i) / kDepth * slot.step,
                      Words<kDepth>::of(load(from, Full{}), odd, round), kLanes);
        }
      }
    }
  });
}

// The same for dX: the channels are the results.
template <class Arithmetic, class T>
void pack_channels(const Context& context, const T* w, std::int64_t taps, const Plan& plan, bool round, Word* to) {
  constexpr std::int64_t kDepth = Arithmetic::kDepth;
  const std::int64_t f = plan.in(), c = plan.out(), groups = plan.lanes() / kLanes;
  std::vector<Plan::Slot> slots(static_cast<std::size_t>(groups * taps));  // a tap belongs to one kind
  for (std::size_t k = 0; k < plan.kinds().size(); ++k) {
    const std::vector<std::int64_t>& order = plan.kinds()[k].taps;
    for (std::size_t t = 0; t < order.size(); ++t) {
      for (std::int64_t g = 0; g < groups; ++g) {
        slots[static_cast<std::size_t>(g * taps + order[t])] = plan.slot(k, t, g * kLanes);
      }
    }
  }
  const std::int64_t words = (f + kDepth - 1) / kDepth, panels = (groups + kVectors - 1) / kVectors;
  context.rows(panels * words, kDepth * kPanel * taps, [&](std::int64_t begin, std::int64_t end) {
    float* const line = kept(Place::kLocal, (kPanel * taps + 2 * kLanes));
    for (std::int64_t part = begin; part < end; ++part) {
      const std::int64_t word = part % words, first = part / words * kPanel;
      const std::int64_t count = std::min(kPanel, c - first), numbers = count * taps;
      const T* const even = w + (word * kDepth * c + first) * taps;
      const T* const odd = kDepth == 2 && word * kDepth + 1 < f ? even + c * taps : nullptr;
      const std::int64_t next = word + 1 < words ? kDepth * c * taps : 0;  // memory far away: nobody else fetches it
      for (std::int64_t j = 0; j < numbers; j += kLanes) {
        const int n = static_cast<int>(std::min<std::int64_t>(kLanes, numbers - j));
        __builtin_prefetch(even + next + j);
        if (odd) __builtin_prefetch(odd + next + j);
        store(line + j, reinterpret_cast<V>(Words<kDepth>::at(even + j, odd ? odd + j : nullptr, n, round)), Full{});
      }
      for (std::int64_t g = first / kLanes; g < std::min(groups, first / kLanes + kVectors); ++g) {
        const float* const from = line + (g * kLanes - first) * taps;
        const std::int64_t rows = std::min<std::int64_t>(kLanes, c - g * kLanes);
        for (std::int64_t t = 0; t < taps; t += kLanes) {
          V read[kLanes] = {};
          if (taps == 1) {
            read[0] = load(from, Part{static_cast<int>(rows)});
          } else {
            for (std::int64_t r = 0; r < rows; ++r) read[r] = load(from + r * taps + t, Full{});
            turned(read);
          }
          for (std::int64_t i = 0; i < std::min<std::int64_t>(kLanes, taps - t); ++i) {
            const Plan::Slot& slot = slots[static_cast<std::size_t>(g * taps + t + i)];
            store(reinterpret_cast<float*>(to + slot.at + word * slot.step), read[i], Full{});
          }
        }
      }
    }
  });
}

}  // namespace channels_last
}  // namespace ortgraph
