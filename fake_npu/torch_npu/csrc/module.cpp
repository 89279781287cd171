// The process group "hccl" (Gloo on the bytes of the npu tensors) and what Python sees of all this.
#include "fake.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/Generator.h>

#include <pybind11/pybind11.h>

namespace py = pybind11;
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace fake_npu {

using c10d::OpType;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

// A finished piece of communication.
struct DoneWork final : Work {
  DoneWork(OpType type, int rank, Tensors out) : Work(rank, type), out_(std::move(out)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!out_.empty()) devices.push_back(out_[0].device());
    auto f = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    f->markCompleted(c10::IValue(out_));
    return f;
  }
  Tensors out_;
};

// Point-to-point work of Gloo; keeps the tensors alive until it is done.
struct P2pWork final : Work {
  P2pWork(WorkPtr inner, Tensors keep) : Work(-1, OpType::UNKNOWN), inner_(std::move(inner)), keep_(std::move(keep)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  bool wait(std::chrono::milliseconds t) override { return inner_->wait(t); }
  void synchronize() override { inner_->synchronize(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  WorkPtr inner_;
  Tensors keep_;
};

struct FakeHccl final : c10d::Backend {
  explicit FakeHccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }

  at::Tensor h(const at::Tensor& t) const {
    TORCH_CHECK(t.device().type() == kNpu, "HCCL: tensors must be NPU and dense, got ", t.device());
    TORCH_CHECK(t.is_contiguous(), "HCCL: tensors must be contiguous");
    TORCH_CHECK(!t.is_complex(), "HCCL: unsupported data type ", t.scalar_type());
    return host_view(t);
  }
  Tensors h(const Tensors& ts) const {
    Tensors out;
    for (auto& t : ts) out.push_back(h(t));
    return out;
  }
  std::vector<Tensors> h(const std::vector<Tensors>& tss) const {
    std::vector<Tensors> out;
    for (auto& ts : tss) out.push_back(h(ts));
    return out;
  }
  WorkPtr done(OpType type, Tensors out) const { return c10::make_intrusive<DoneWork>(type, rank_, std::move(out)); }

  // Reduces a host tensor in place over all ranks. 16-bit floats are summed in fp32: Gloo's own bf16 sum rounds each step.
  void reduce_all(at::Tensor x, const c10d::ReduceOp& op, std::chrono::milliseconds timeout) {
    TORCH_CHECK(op != c10d::ReduceOp::BAND && op != c10d::ReduceOp::BOR && op != c10d::ReduceOp::BXOR,
                "Cannot use ReduceOp.BAND/BOR/BXOR with HCCL");
    auto type = x.scalar_type();
    TORCH_CHECK(type != at::kDouble, "HCCL: Unsupported data type at::kDouble for a reduction");
    const bool avg = op == c10d::ReduceOp::AVG;
    auto work = type == at::kBFloat16 || type == at::kHalf ? x.to(at::kFloat) : type == at::kBool ? x.to(at::kByte) : x;
    c10d::AllreduceOptions o;
    o.reduceOp = avg ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    o.timeout = timeout;
    Tensors v{work};
    gloo_->allreduce(v, o)->wait();
    if (avg && work.is_floating_point()) work.div_(size_);
    else if (avg) work.floor_divide_(size_);
    if (!work.is_same(x)) x.copy_(work);
    saturate(x, true);
  }

  WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override {
    for (auto& t : ts) reduce_all(h(t), o.reduceOp, o.timeout);
    return done(OpType::ALLREDUCE, ts);
  }
  WorkPtr allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override { return allreduce(ts, o); }
  WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    auto hs = h(ts);
    gloo_->broadcast(hs, o)->wait();
    return done(OpType::BROADCAST, ts);
  }
  WorkPtr reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
    auto x = h(ts[0]);
    auto sum = x.clone(); // only the root's tensor may change
    reduce_all(sum, o.reduceOp, o.timeout);
    if (rank_ == o.rootRank) x.copy_(sum);
    return done(OpType::REDUCE, ts);
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    auto ho = h(outs);
    auto hi = h(ins);
    gloo_->allgather(ho, hi, o)->wait();
    return done(OpType::ALLGATHER, outs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.numel() == in.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    Tensors hi{h(in).view({-1})};
    std::vector<Tensors> ho{h(out).view({size_, -1}).unbind(0)};
    gloo_->allgather(ho, hi, o)->wait();
    return done(OpType::_ALLGATHER_BASE, {out});
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    for (int r = 0; r < size_; ++r) { // one reduction for each receiver, since their shapes may differ
      auto sum = h(ins[0][r]).clone();
      reduce_all(sum, o.reduceOp, o.timeout);
      if (r == rank_) h(outs[0]).copy_(sum);
    }
    return done(OpType::REDUCE_SCATTER, outs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(in.numel() == out.numel() * size_, "input tensor must be the same size as output size times world size");
    auto mine = h(out).view({-1});
    auto sum = h(in).clone();
    reduce_all(sum, o.reduceOp, o.timeout);
    mine.copy_(sum.view({size_, -1})[rank_]);
    return done(OpType::_REDUCE_SCATTER_BASE, {out});
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    auto ho = h(outs);
    auto hi = h(ins);
    gloo_->gather(ho, hi, o)->wait();
    return done(OpType::GATHER, outs.empty() ? Tensors{} : outs[0]);
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    auto ho = h(outs);
    auto hi = h(ins);
    gloo_->scatter(ho, hi, o)->wait();
    return done(OpType::SCATTER, outs);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& o) override {
    auto ho = h(out);
    auto hi = h(in);
    gloo_->alltoall_base(ho, hi, out_sizes, in_sizes, o)->wait();
    return done(OpType::ALLTOALL_BASE, {out});
  }
  WorkPtr send(Tensors& ts, int dst, int tag) override {
    auto hs = h(ts);
    return c10::make_intrusive<P2pWork>(gloo_->send(hs, dst, tag), hs);
  }
  WorkPtr recv(Tensors& ts, int src, int tag) override {
    auto hs = h(ts);
    return c10::make_intrusive<P2pWork>(gloo_->recv(hs, src, tag), hs);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    gloo_->barrier(o)->wait();
    return done(OpType::BARRIER, {});
  }
  void setTimeout(std::chrono::milliseconds t) override { gloo_->setTimeout(t); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace fake_npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake_npu;
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("set_soc", &set_soc);
  m.def("overflow_flag", &overflow_flag);
  m.def("set_overflow_flag", &set_overflow_flag);
  m.def("mem_total", &mem_total);
  m.def("reset_peak", &reset_peak);
  m.def("mem_stats", [](int i) {
    auto s = mem_stats(i);
    py::dict d;
    d["current"] = s.now;
    d["peak"] = s.peak;
    d["allocated"] = s.allocated;
    d["freed"] = s.freed;
    return d;
  });
  m.def("default_generator", [](int i) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(i)));
  });
  m.def("set_strict", &set_strict);
  m.def("set_op_log", &set_op_log);
  m.def("op_log", [] {
    py::dict d;
    for (auto& [name, count] : op_log()) d[name.c_str()] = count;
    return d;
  });
  m.def("make_hccl", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<FakeHccl>(gloo);
  });
}
