#include "backward_op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "registration.h"
#include "tensors.h"

namespace opgraft {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Where an argument of the backward op comes from.
struct Source {
  enum class Kind : uint8_t { Gradient, Argument, Output };
  Kind kind;
  size_t index;  // of the output, the argument, or the output
  bool may_be_none;
};

std::optional<size_t> index_of(const std::vector<c10::Argument>& all, const std::string& name) {
  for (size_t index = 0; index < all.size(); ++index) {
    if (all[index].name() == name) return index;
  }
  return std::nullopt;
}

std::optional<std::string> after_prefix(const std::string& name) {
  static const std::string prefix = "grad_";
  if (name.rfind(prefix, 0) != 0) return std::nullopt;
  return name.substr(prefix.size());
}

// How an op and its backward op belong together.
class Pairing {
 public:
  Pairing(c10::OperatorHandle forward, c10::OperatorHandle differentiates)
      : op(std::move(forward)),
        backward(std::move(differentiates)),
        gradient_of(op.schema().returns().size()) {
    for (const auto& wanted : backward.schema().arguments()) sources.push_back(source_of(wanted));
    for (const auto& result : backward.schema().returns()) {
      const auto target = after_prefix(result.name());
      const auto index = target ? index_of(op.schema().arguments(), *target) : std::nullopt;
      TORCH_CHECK(index, backward.operator_name(), " returns ", result.name(), ", which is the ",
                  "gradient of no argument of ", op.operator_name());
      differentiated.push_back(*index);
    }
    size_t next = 0;
    for (auto& gradient : gradient_of) {
      if (gradient) gradient = next++;
    }
  }

  c10::OperatorHandle op, backward;
  // Of the op's outputs: which of the node's gradients is theirs, if they have any.
  std::vector<std::optional<size_t>> gradient_of;
  std::vector<Source> sources;         // of the backward op's arguments
  std::vector<size_t> differentiated;  // the arguments that the backward op's results are for
  // One of the two ops was destroyed, and a handle is valid no longer.
  std::atomic<bool> is_outdated{false};

  void check_ops_exist() const {
    TORCH_CHECK(
        !is_outdated.load(std::memory_order_acquire),
        "an op whose derivative opgraft.register_backward declared was destroyed, or the op "
        "of its backward: define both again, and register the backward again");
  }

  // Whether what the backward op returns can be differentiated: it has a derivative of its own, and
  // no part of it is lost with an output that has none.
  bool is_differentiable() const {
    return backward.hasKernelForDispatchKey(c10::DispatchKey::Autograd) &&
           std::all_of(sources.begin(), sources.end(), [this](const Source& source) {
             return source.kind != Source::Kind::Output || gradient_of[source.index].has_value();
           });
  }

  // Whether the backward op takes None as the gradient of each output.
  bool takes_no_gradient() const {
    return std::all_of(sources.begin(), sources.end(), [](const Source& source) {
      return source.kind != Source::Kind::Gradient || source.may_be_none;
    });
  }

 private:
  Source source_of(const c10::Argument& wanted) {
    const bool optional = wanted.type()->kind() == c10::TypeKind::OptionalType;
    if (const auto target = after_prefix(wanted.name())) {
      if (const auto output = index_of(op.schema().returns(), *target)) {
        gradient_of[*output] = 0;
        return {Source::Kind::Gradient, *output, optional};
      }
    }
    if (const auto output = index_of(op.schema().returns(), wanted.name()))
      return {Source::Kind::Output, *output, optional};
    const auto argument = index_of(op.schema().arguments(), wanted.name());
    TORCH_CHECK(argument, backward.operator_name(), " wants ", wanted.name(), ", which is no ",
                "argument and no output of ", op.operator_name());
    return {Source::Kind::Argument, *argument, optional};
  }
};

// A graph names its pairing by a number: compiled autograd keeps numbers, and no pointers.
class Pairings {
 public:
  static Pairings& instance() {
    static auto& all = *new Pairings;  // graphs may be run as long as the process lives
    return all;
  }

  int64_t add(std::shared_ptr<Pairing> pairing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(std::move(pairing));
    return static_cast<int64_t>(all_.size()) - 1;
  }

  std::shared_ptr<const Pairing> get(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return all_.at(static_cast<size_t>(number));
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Pairing>> all_;
};

// A call that is to be differentiated.
struct Invocation {
  const Pairing& pairing;
  int64_t number;
  c10::DispatchKeySet keyset;
  torch::jit::Stack& stack;
  std::vector<int64_t> given;  // which of the backward op's results have an argument

  const c10::IValue* last(size_t count) const { return stack.data() + stack.size() - count; }
};

void run_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                        torch::jit::Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keyset & c10::after_ADInplaceOrView_keyset, &stack);
}

// The node of autograd's graph. torch's own class for it keeps what is saved, for hooks and
// compiled autograd too.
class ByOp : public torch::autograd::Function<ByOp> {
 public:
  // It calls one op, so compiled autograd may trace it.
  static constexpr bool is_traceable = true;

  // `TensorList`: the arguments that get gradients.
  static variable_list forward(AutogradContext* ctx, at::TensorList, Invocation* call) {
    const Pairing& pairing = call->pairing;
    const auto& schema = pairing.op.schema();
    const auto* const first = call->last(schema.arguments().size());
    const torch::jit::Stack arguments(first, first + schema.arguments().size());
    run_below_autograd(pairing.op, call->keyset, call->stack);
    const auto* const outputs = call->last(schema.returns().size());
    const auto anchor = at::empty({0}, outputs[0].toTensor().options().dtype(at::kFloat));
    save(ctx, *call, arguments, outputs, anchor);
    ctx->set_materialize_grads(!pairing.takes_no_gradient());
    // Compiled autograd knows no outputs that are marked as not differentiable.
    variable_list differentiable;
    for (size_t index = 0; index < schema.returns().size(); ++index) {
      if (pairing.gradient_of[index]) differentiable.push_back(outputs[index].toTensor());
    }
    differentiable.push_back(anchor);
    return differentiable;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto pairing = Pairings::instance().get(ctx->saved_data.at(kPairing).toInt());
    pairing->check_ops_exist();
    const auto tensors = ctx->get_saved_variables();
    torch::jit::Stack stack;
    size_t next = 0;
    for (size_t index = 0; index < pairing->sources.size(); ++index) {
      const Source& source = pairing->sources[index];
      const auto value = ctx->saved_data.find(key_of(index));
      if (value != ctx->saved_data.end()) {
        stack.push_back(value->second);
        continue;
      }
      const bool is_gradient = source.kind == Source::Kind::Gradient;
      const at::Tensor& tensor =
          is_gradient ? gradients[pairing->gradient_of[source.index].value()] : tensors[next++];
      stack.push_back(tensor.defined() || !source.may_be_none ? c10::IValue(tensor)
                                                              : c10::IValue());
    }
    const bool creates_graph = c10::GradMode::is_enabled();
    const bool has_tangent = has_tangents(view(stack));
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent || pairing->is_differentiable(),
                                pairing->backward.operator_name(),
                                " has no forward-mode derivative: ", kOnce);
    const bool is_differentiable = (creates_graph || has_tangent) && pairing->is_differentiable();
    if (is_differentiable) {
      pairing->backward.callBoxed(stack);
    } else {
      // Autograd would find derivatives in what the op's kernel calls.
      const at::AutoDispatchBelowADInplaceOrView below;
      pairing->backward.callBoxed(stack);
    }
    variable_list found;
    for (const auto& index : ctx->saved_data.at(kGiven).toIntVector()) {
      found.push_back(std::move(stack.at(static_cast<size_t>(index))).toTensor());
    }
    if (creates_graph && !is_differentiable)
      found = once_differentiable(*pairing, std::move(found), gradients, tensors.back());
    found.emplace_back();  // of the pointer that `forward` got
    return found;
  }

 private:
  static constexpr const char* kPairing = "pairing";
  static constexpr const char* kGiven = "given";
  static constexpr const char* kOnce =
      "opgraft.register_backward declares how to differentiate once; if an override calls it, "
      "opgraft.disabled() leaves the call to the native kernel";
  static std::string key_of(size_t source) { return std::to_string(source); }

  // The same gradients, of which it is an error to differentiate one. What they depend on need not
  // be in their own graph: it is in those of the gradients that they are made of, and in the
  // node's, to whose inputs `anchor` leads.
  static variable_list once_differentiable(const Pairing& pairing, variable_list found,
                                           const variable_list& gradients,
                                           const at::Tensor& anchor) {
    const size_t count = found.size();
    found.insert(found.end(), gradients.begin(), gradients.end());
    found.push_back(anchor);
    torch::autograd::DelayedError node("derivative for " +
                                           c10::toString(pairing.backward.operator_name()) +
                                           " is not implemented: " + kOnce,
                                       static_cast<int64_t>(found.size()));
    found = node.apply(std::move(found));
    found.resize(count);
    return found;
  }

  // `anchor`: an output that nobody gets, and whose graph is the node's.
  static void save(AutogradContext* ctx, const Invocation& call, const torch::jit::Stack& arguments,
                   const c10::IValue* outputs, const at::Tensor& anchor) {
    variable_list tensors;
    for (size_t index = 0; index < call.pairing.sources.size(); ++index) {
      const Source& source = call.pairing.sources[index];
      if (source.kind == Source::Kind::Output) tensors.push_back(outputs[source.index].toTensor());
      if (source.kind != Source::Kind::Argument) continue;
      if (const auto& value = arguments[source.index]; value.isTensor()) {
        tensors.push_back(value.toTensor());
      } else {
        ctx->saved_data[key_of(index)] = value;
      }
    }
    ctx->saved_data[kPairing] = call.number;
    ctx->saved_data[kGiven] = call.given;
    tensors.push_back(anchor);
    ctx->save_for_backward(std::move(tensors));
  }
};

// Stands at the autograd keys of the op.
class ForwardKernel final : public c10::OperatorKernel {
 public:
  ForwardKernel(std::shared_ptr<const Pairing> pairing, int64_t number)
      : pairing_(std::move(pairing)), number_(number) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> arguments(stack->data() + stack->size() - count, count);
    if (!must_differentiate(view(arguments))) {
      run_below_autograd(op, keyset, *stack);
      return;
    }
    pairing_->check_ops_exist();
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangents(view(arguments)), op.operator_name(),
                                " has no forward-mode derivative: opgraft.register_backward "
                                "declared its backward alone");
    Invocation call{*pairing_, number_, keyset, *stack, {}};
    variable_list inputs;
    for (size_t result = 0; result < pairing_->differentiated.size(); ++result) {
      const c10::IValue& argument = arguments[pairing_->differentiated[result]];
      if (!argument.isTensor() || !argument.toTensor().defined()) continue;
      inputs.push_back(argument.toTensor());
      call.given.push_back(static_cast<int64_t>(result));
    }
    auto differentiable = ByOp::apply(at::TensorList(inputs), &call);
    c10::IValue* const outputs = stack->data() + stack->size() - pairing_->gradient_of.size();
    for (size_t index = 0; index < pairing_->gradient_of.size(); ++index) {
      if (const auto which = pairing_->gradient_of[index])
        outputs[index] = std::move(differentiable[*which]);
    }
  }

 private:
  std::shared_ptr<const Pairing> pairing_;
  int64_t number_;
};

}  // namespace

void register_backward(const std::string& name, const std::string& overload,
                       const std::string& backward, const std::string& backward_overload) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto pairing = std::make_shared<Pairing>(
      dispatcher.findSchemaOrThrow(name.c_str(), overload.c_str()),
      dispatcher.findSchemaOrThrow(backward.c_str(), backward_overload.c_str()));
  const auto outdate = [pairing] {
    pairing->is_outdated.store(true);
  };
  when_destroyed(pairing->op.operator_name(), outdate);
  when_destroyed(pairing->backward.operator_name(), outdate);
  const auto number = Pairings::instance().add(pairing);
  // Never destroyed: the dispatcher may be destroyed before our statics.
  new Registration(
      pairing->op, c10::DispatchKey::Autograd,
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<ForwardKernel>(pairing, number)));
}

}  // namespace opgraft
