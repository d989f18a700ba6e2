#include "parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace strips {
namespace {

using Fork = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);  // GOMP_parallel
Fork fork_threads = nullptr;

struct Team {
  const std::function<void(int)>& body;
  int items;
  std::atomic<int> next{0};

  void work() {
    for (int item; (item = next++) < items;) body(item);
  }
};

}  // namespace

bool use_openmp(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (loaded) fork_threads = reinterpret_cast<Fork>(dlsym(loaded, "GOMP_parallel"));
  return fork_threads != nullptr;
}

void on_threads(int threads, int items, const std::function<void(int)>& body) {
  threads = std::min(threads, items);
  Team team{body, items};
  if (threads <= 1) return team.work();
  if (fork_threads) return fork_threads([](void* data) { static_cast<Team*>(data)->work(); }, &team, threads, 0);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back([&] { team.work(); });
  team.work();
  for (auto& other : others) other.join();
}

}  // namespace strips
