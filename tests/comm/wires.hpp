// Processes of a world as a test sees them: all in this process, their messages in memory.
#pragma once
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "comm/wire.hpp"

namespace zg::test {

// What the wires of a world share.
struct Post {
  std::mutex mutex;
  std::map<std::tuple<int, int, int>, std::deque<std::vector<char>>> boxes;  // by sender, receiver, tag
  std::optional<std::pair<int, Error>> failure;                              // the first one
  int teller = -1;                                                           // the process that told it
};

class MemoryWire final : public comm::Wire {
 public:
  MemoryWire(std::shared_ptr<Post> post, int process) : post_(std::move(post)), process_(process) {}
  int process() const override { return process_; }
  std::string describe() const override { return "memory"; }
  std::unique_ptr<Request> send(int process, int tag, const void* data, std::int64_t bytes) override {
    const auto* const first = static_cast<const char*>(data);
    std::lock_guard lock(post_->mutex);
    post_->boxes[{process_, process, tag}].emplace_back(first, first + bytes);
    return std::make_unique<Done>();
  }
  std::unique_ptr<Request> receive(int process, int tag, void* data, std::int64_t bytes) override {
    return std::make_unique<Receipt>(*post_, std::tuple(process, process_, tag), data, bytes);
  }
  void abort() override {}
  void tell_failure(int rank, const Error& error) override {
    std::lock_guard lock(post_->mutex);
    if (post_->failure) return;
    post_->failure.emplace(rank, error);
    post_->teller = process_;
  }
  std::optional<std::pair<int, Error>> heard_failure() override {
    std::lock_guard lock(post_->mutex);
    return post_->teller == process_ ? std::nullopt : post_->failure;
  }

 private:
  struct Done final : Request {
    bool test() override { return true; }
  };
  struct Receipt final : Request {
    Receipt(Post& p, std::tuple<int, int, int> b, void* d, std::int64_t n)
        : post(p), box(std::move(b)), data(d), bytes(n) {}
    bool test() override {
      std::lock_guard lock(post.mutex);
      auto& letters = post.boxes[box];
      if (letters.empty()) return false;
      ZG_ASSERT_EQ(static_cast<std::int64_t>(letters.front().size()), bytes);
      std::memcpy(data, letters.front().data(), letters.front().size());
      letters.pop_front();
      return true;
    }
    Post& post;
    const std::tuple<int, int, int> box;
    void* const data;
    const std::int64_t bytes;
  };

  const std::shared_ptr<Post> post_;
  const int process_;
};

}  // namespace zg::test
