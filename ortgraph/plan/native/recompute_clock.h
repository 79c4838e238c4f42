// Random numbers and a deadline.
#pragma once

#include <chrono>
#include <cstdint>

namespace recompute {

class Random {
 public:
  // Seeds that follow each other must not give shifted copies of one stream, hence the other factor.
  explicit Random(uint64_t seed) : state_((seed + 1) * 0xD1342543DE82EF95ull) { bits(); }
  uint64_t bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>((static_cast<unsigned __int128>(bits()) * n) >> 64); }
  double unit() { return (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53; }
  bool chance(double p) { return unit() < p; }

 private:
  uint64_t state_;
};

class Deadline {
 public:
  explicit Deadline(double seconds) : start_(Clock::now()), seconds_(seconds) {}
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  bool passed() const { return elapsed() >= seconds_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  double seconds_;
};

}  // namespace recompute
