// Collectives of device memory: gloo's, run by a thread of the group as items of a stream that is the group's own.
#include "device.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <random>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace emulated {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Gloo = c10::intrusive_ptr<c10d::Backend>;
using Started = c10::intrusive_ptr<c10d::Work>;
using Step = std::function<Started()>;

// The tensors of a collective, held until it is waited for or done, whichever is first.
struct Kept {
  std::mutex mutex;
  Tensors tensors;
  void drop() {
    Tensors dropped;  // Freed once the lock is not held any more.
    std::lock_guard<std::mutex> lock(mutex);
    dropped.swap(tensors);
  }
};

struct Job {
  std::shared_ptr<External> external;
  std::vector<Step> steps;
  bool together = false;  // All steps are begun before one is waited for, as sends and receives of a pair must be.
  std::function<void()> after;
  std::shared_ptr<Kept> kept;
};

// The thread's, which outlives the group if a peer never comes.
struct Jobs {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> queue;
  bool over = false;
};

void work(const std::shared_ptr<Jobs>& jobs, unsigned seed) {
  std::minstd_rand random(seed);
  while (true) {
    Lock lock(jobs->mutex);
    jobs->changed.wait(lock, [&] { return jobs->over || !jobs->queue.empty(); });
    if (jobs->queue.empty()) return;
    Job job = std::move(jobs->queue.front());
    jobs->queue.pop_front();
    lock.unlock();
    std::string failure;
    try {
      reach(*job.external);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      std::vector<Started> started;
      for (auto& step : job.steps) {
        auto one = step();
        if (job.together) {
          started.push_back(one);
        } else if (one) {
          one->wait();
        }
      }
      for (auto& one : started) one->wait();
      if (job.after) job.after();
    } catch (const std::exception& error) {
      failure = std::string("a collective failed: ") + error.what();
    }
    job.steps.clear();
    complete(*job.external, failure);
    job.kept->drop();
  }
}

struct QueuedWork final : c10d::Work {
  std::shared_ptr<Mark> end;
  std::shared_ptr<Kept> kept;
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  int device;
  bool blocks = false;

  QueuedWork(int rank, c10d::OpType type, int device) : Work(rank, type), device(device) {}
  bool isCompleted() override { return query(*end); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  // As NCCL's: the stream waits, not the host, and from then on the memory is the stream's to keep.
  void synchronize() override {
    wait_for(current_stream(device), end);
    if (blocks) emulated::finish(current_stream(device));
    if (kept) kept->drop();
  }
  std::vector<Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

c10d::ReduceOp plain(const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
}

Tensors aliases(const Tensors& tensors) {
  Tensors made;
  for (auto& tensor : tensors) made.push_back(host_alias(tensor));
  return made;
}

struct Collectives final : c10d::Backend {
  Gloo gloo;
  std::shared_ptr<Jobs> jobs = std::make_shared<Jobs>();
  std::unordered_map<int, Stream*> streams;
  bool coalescing = false;
  std::vector<Step> coalesced;
  Tensors coalesced_tensors;

  explicit Collectives(Gloo inner) : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {
    std::thread([jobs = jobs, seed = unsigned(gloo->getRank() + 1)] { work(jobs, seed); }).detach();
  }
  ~Collectives() override { shutdown(); }
  void shutdown() override {
    Lock lock(jobs->mutex);
    jobs->over = true;
    jobs->changed.notify_all();
  }
  const std::string getBackendName() const override { return "emulated_ccl"; }
  bool supportsCoalescing() const override { return true; }

  Started launch(c10d::OpType type, std::vector<Step> steps, Tensors outputs, Tensors kept,
                 std::function<void()> after = nullptr, bool together = false) {
    if (coalescing) {
      for (auto& step : steps) coalesced.push_back(std::move(step));
      coalesced_tensors.insert(coalesced_tensors.end(), kept.begin(), kept.end());
      return c10::make_intrusive<QueuedWork>(rank_, type, current_device());
    }
    int device = kept.empty() ? current_device() : kept[0].device().index();
    auto*& stream = streams[device];
    if (!stream) stream = &new_stream(device);
    size_t bytes = 0;
    for (auto& tensor : outputs) bytes += tensor.nbytes();
    wait_for(*stream, record(current_stream(device)));
    auto done = c10::make_intrusive<QueuedWork>(rank_, type, device);
    Job job{external(*stream, c10d::opTypeToString(type), bytes), std::move(steps), together, std::move(after),
            std::make_shared<Kept>()};
    job.kept->tensors = std::move(kept);
    done->end = record(*stream);
    done->kept = job.kept;
    done->outputs = outputs;
    done->blocks = type == c10d::OpType::BARRIER;
    c10::Device where(TYPE, c10::DeviceIndex(device));
    done->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{where});
    {
      // Whoever waits for the future waits for what is in the stream that is current now.
      c10::StreamGuard guard(torch_stream(*stream));
      done->future->markCompleted(c10::IValue(std::move(outputs)));
    }
    Lock lock(jobs->mutex);
    jobs->queue.push_back(std::move(job));
    jobs->changed.notify_all();
    return done;
  }

  void startCoalescing() override { coalescing = true; }
  Started endCoalescing() override {
    coalescing = false;
    Tensors tensors = std::exchange(coalesced_tensors, {});
    return launch(c10d::OpType::COALESCED, std::exchange(coalesced, {}), tensors, tensors, nullptr, true);
  }

  // Gloo has no mean: it is the sum, divided afterwards.
  std::function<void()> division(const c10d::ReduceOp& op, Tensors hosts) {
    if (op != c10d::ReduceOp::AVG) return nullptr;
    return [hosts = std::move(hosts), size = size_] {
      for (auto& host : hosts) divide(host, size);
    };
  }
  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto step = [gloo = gloo, hosts = aliases(tensors), options]() mutable { return gloo->broadcast(hosts, options); };
    return launch(c10d::OpType::BROADCAST, {step}, tensors, tensors);
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = aliases(tensors);
    auto how = options;
    how.reduceOp = plain(options.reduceOp);
    auto step = [gloo = gloo, hosts, how]() mutable { return gloo->allreduce(hosts, how); };
    return launch(c10d::OpType::ALLREDUCE, {step}, tensors, tensors, division(options.reduceOp, hosts));
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Step> steps;
    auto hosts = aliases(tensors);
    c10d::AllreduceOptions how;
    how.reduceOp = plain(options.reduceOp);
    for (auto& host : hosts) {
      steps.push_back([gloo = gloo, one = Tensors{host}, how]() mutable { return gloo->allreduce(one, how); });
    }
    return launch(c10d::OpType::ALLREDUCE_COALESCED, steps, tensors, tensors, division(options.reduceOp, hosts));
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto hosts = aliases(tensors);
    auto how = options;
    how.reduceOp = plain(options.reduceOp);
    auto step = [gloo = gloo, hosts, how]() mutable { return gloo->reduce(hosts, how); };
    return launch(c10d::OpType::REDUCE, {step}, tensors, tensors, division(options.reduceOp, hosts));
  }
  Started allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> hosts;
    Tensors all, kept = inputs;
    for (auto& row : outputs) {
      hosts.push_back(aliases(row));
      all.insert(all.end(), row.begin(), row.end());
    }
    kept.insert(kept.end(), all.begin(), all.end());
    auto step = [gloo = gloo, hosts, from = aliases(inputs), options]() mutable {
      return gloo->allgather(hosts, from, options);
    };
    return launch(c10d::OpType::ALLGATHER, {step}, all, kept);
  }
  Step gathering(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
    return [gloo = gloo, to = host_alias(output), from = host_alias(input), options]() mutable {
      return gloo->_allgather_base(to, from, options);
    };
  }
  Started _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, {gathering(output, input, options)}, {output}, {output, input});
  }
  Started allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    std::vector<Step> steps;
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    for (size_t i = 0; i < outputs.size(); i++) steps.push_back(gathering(outputs[i], inputs[i], options));
    return launch(c10d::OpType::COALESCED, steps, outputs, kept);
  }
  Step scattering(Tensor& output, Tensor& input, c10d::ReduceScatterOptions options) {
    options.reduceOp = plain(options.reduceOp);
    return [gloo = gloo, to = host_alias(output), from = host_alias(input), options]() mutable {
      return gloo->_reduce_scatter_base(to, from, options);
    };
  }
  Started _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return launch(c10d::OpType::_REDUCE_SCATTER_BASE, {scattering(output, input, options)}, {output}, {output, input},
                  division(options.reduceOp, {host_alias(output)}));
  }
  Started reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<Step> steps;
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    for (size_t i = 0; i < outputs.size(); i++) steps.push_back(scattering(outputs[i], inputs[i], options));
    return launch(c10d::OpType::COALESCED, steps, outputs, kept, division(options.reduceOp, aliases(outputs)));
  }
  Started send(Tensors& tensors, int to, int tag) override {
    auto step = [gloo = gloo, hosts = aliases(tensors), to, tag]() mutable { return gloo->send(hosts, to, tag); };
    return launch(c10d::OpType::SEND, {step}, tensors, tensors);
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    auto step = [gloo = gloo, hosts = aliases(tensors), from, tag]() mutable { return gloo->recv(hosts, from, tag); };
    return launch(c10d::OpType::RECV, {step}, tensors, tensors);
  }
  Started alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto step = [gloo = gloo, to = host_alias(output), from = host_alias(input), out_sizes, in_sizes,
                 options]() mutable { return gloo->alltoall_base(to, from, out_sizes, in_sizes, options); };
    return launch(c10d::OpType::ALLTOALL_BASE, {step}, {output}, {output, input});
  }
  Started barrier(const c10d::BarrierOptions&) override {
    auto step = [gloo = gloo] { return gloo->barrier(); };
    return launch(c10d::OpType::BARRIER, {step}, {}, {});
  }
};

}  // namespace

void bind_process_group(pybind11::module& module) {
  module.def("collectives", [](const Gloo& gloo) -> Gloo { return c10::make_intrusive<Collectives>(gloo); });
}

}  // namespace emulated
