// Threads for callers that have none of their own to give.
#pragma once

#include <string>

#include "strips.h"

namespace strips {

// Take the threads of an OpenMP runtime that this process has loaded: a second pool would compete with its own threads,
// which spin for a while after each use. Without one, threads are started for each call.
bool use_openmp(const std::string& library);

void on_threads(int threads, int items, const std::function<void(int)>& body);

}  // namespace strips
