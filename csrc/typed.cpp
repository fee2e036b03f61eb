#include "typed.h"

#include <ATen/core/boxing/impl/boxing.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "argument.h"
#include "router.h"
#include "signatures.h"

namespace opgraft {

namespace {

// --------------------------------------------------------------------------- boxing and unboxing

// An argument's address, and how to box it. This is compiled once per type, not per signature.
struct Boxable {
  const void* argument;
  c10::IValue (*boxed)(const void* argument);
};

template <class T>
c10::IValue boxed(const void* argument) {
  return c10::IValue(*static_cast<const T*>(argument));
}

template <class T>
Boxable boxable(const T& argument) {
  return {std::addressof(argument), &boxed<T>};
}

// Boxes a call that an override may take, runs it, and returns the results.
C10_NOINLINE torch::jit::Stack run_boxed(Router& router, std::unique_ptr<PendingCall> pending,
                                         c10::DispatchKeySet keyset,
                                         c10::ArrayRef<Boxable> boxables) {
  torch::jit::Stack stack;
  stack.reserve(boxables.size());
  for (const Boxable& each : boxables) stack.push_back(each.boxed(each.argument));
  Call call{router.op(), keyset, stack, boxables.size()};
  router.run_pending(*pending, call);
  return stack;
}

template <class Return>
C10_NOINLINE Return unboxed(torch::jit::Stack stack) {
  return c10::impl::PopResult<Return>::call(stack);
}

// What the op returns in C++. An op that writes to arguments returns those, the first one or the
// last ones, as in torch's own boxing.
template <class Return, class... Args>
Return results(torch::jit::Stack stack, std::tuple<Args&...> arguments) {
  if constexpr (std::is_same_v<Return, at::Tensor&>) {
    constexpr bool in_place =
        std::is_same_v<std::tuple_element_t<0, std::tuple<Args...>>, at::Tensor>;
    return std::get<in_place ? 0 : sizeof...(Args) - 1>(arguments);
  } else if constexpr (c10::impl::is_tuple_of_mutable_tensor_refs<Return>::value) {
    return c10::guts::tuple_take<std::tuple<Args&...>, -int{std::tuple_size_v<Return>}>(arguments);
  } else if constexpr (!std::is_void_v<Return>) {
    return unboxed<Return>(std::move(stack));
  }
}

// Whether a kernel has an unboxed function, with or without symbolic sizes as in this signature.
template <class Signature>
bool has_unboxed(const c10::KernelFunction& kernel) {
  return c10::fn_has_symint<Signature>::value ? kernel.isValidSymUnboxed()
                                              : kernel.isValidUnboxed();
}

template <class Return, class... Args>
C10_ALWAYS_INLINE Return run_native(const RouterKernel& kernel, c10::DispatchKeySet keyset,
                                    Args... arguments) {
  const c10::KernelFunction& native = kernel.native.function();
  // Checked when the router was created. This keeps the code to call a boxed kernel out of each
  // instantiation.
  if (!has_unboxed<Return(Args...)>(native)) __builtin_unreachable();
  return native.template call<Return, Args...>(kernel.router.op(), keyset,
                                               std::forward<Args>(arguments)...);
}

// A call of which it is not known at once that every override declines it.
template <class Return, class... Args>
C10_NOINLINE Return route(const RouterKernel& kernel, c10::DispatchKeySet keyset,
                          Args... arguments) {
  Router& router = kernel.router;
  if (!router.is_idle()) {
    const std::array<Argument, sizeof...(Args)> view{Argument::of(arguments)...};
    if (auto pending = kernel.pending_call(view.data(), keyset)) {
      if (pending->action == PendingCall::Action::ReturnResults) {
        return results<Return>(std::move(pending->results), std::tie(arguments...));
      }
      const std::array<Boxable, sizeof...(Args)> boxables{boxable(arguments)...};
      return results<Return>(run_boxed(router, std::move(pending), keyset, boxables),
                             std::tie(arguments...));
    }
  }
  return run_native<Return, Args...>(kernel, keyset, std::forward<Args>(arguments)...);
}

// The tensor that an argument is, if it is one.
template <class T>
const c10::TensorImpl* tensor_of(const T& argument) {
  if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return argument ? tensor_of(*argument) : nullptr;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return argument.defined() ? argument.unsafeGetTensorImpl() : nullptr;
  } else {
    return nullptr;
  }
}

// The tensor at a position, if there is one.
template <class... Args>
const c10::TensorImpl* tensor_at(int16_t position, const Args&... arguments) {
  const c10::TensorImpl* found = nullptr;
  int16_t here = 0;
  ((found = here++ == position ? tensor_of(arguments) : found), ...);
  return found;
}

// Nearly every call is a miss that is known at once. So only what that needs is made of it here.
template <class Return, class... Args>
[[gnu::hot]] Return call(c10::OperatorKernel* functor, c10::DispatchKeySet keyset,
                         Args... arguments) {
  const auto& kernel = *static_cast<RouterKernel*>(functor);
  const int16_t asked = kernel.router.asked_argument();
  if (C10_LIKELY(!kernel.at_autograd &&
                 kernel.router.misses_at_once(asked, tensor_at(asked, arguments...)))) {
    return run_native<Return, Args...>(kernel, keyset, std::forward<Args>(arguments)...);
  }
  return route<Return, Args...>(kernel, keyset, std::forward<Args>(arguments)...);
}

// --------------------------------------------------------------------------- signatures by schema

// How a schema writes the C++ type of a kernel's argument or result, with symbolic sizes as plain
// ones.
template <class T>
constexpr const char* schema_type = nullptr;
template <class T>
constexpr const char* schema_type<const T&> = schema_type<T>;
template <>
constexpr const char* schema_type<at::Tensor> = "Tensor";
template <>
constexpr const char* schema_type<at::Tensor&> = "Tensor!";
template <>
constexpr const char* schema_type<std::optional<at::Tensor>> = "Tensor?";
template <>
constexpr const char* schema_type<at::TensorList> = "Tensor[]";
template <>
constexpr const char* schema_type<at::ITensorListRef> = "Tensor[]";
template <>
constexpr const char* schema_type<std::vector<at::Tensor>> = "Tensor[]";
template <>
constexpr const char* schema_type<c10::List<std::optional<at::Tensor>>> = "Tensor?[]";
template <>
constexpr const char* schema_type<int64_t> = "int";
template <>
constexpr const char* schema_type<c10::SymInt> = "int";
template <>
constexpr const char* schema_type<std::optional<int64_t>> = "int?";
template <>
constexpr const char* schema_type<std::optional<c10::SymInt>> = "int?";
template <>
constexpr const char* schema_type<at::IntArrayRef> = "int[]";
template <>
constexpr const char* schema_type<c10::SymIntArrayRef> = "int[]";
template <>
constexpr const char* schema_type<at::OptionalIntArrayRef> = "int[]?";
template <>
constexpr const char* schema_type<at::OptionalSymIntArrayRef> = "int[]?";
template <>
constexpr const char* schema_type<bool> = "bool";
template <>
constexpr const char* schema_type<std::optional<bool>> = "bool?";
template <size_t Size>
constexpr const char* schema_type<std::array<bool, Size>> = "bool[]";
template <>
constexpr const char* schema_type<double> = "float";
template <>
constexpr const char* schema_type<std::optional<double>> = "float?";
template <>
constexpr const char* schema_type<std::optional<at::ArrayRef<double>>> = "float[]?";
template <>
constexpr const char* schema_type<at::Scalar> = "Scalar";
template <>
constexpr const char* schema_type<std::optional<at::Scalar>> = "Scalar?";
template <>
constexpr const char* schema_type<at::ArrayRef<at::Scalar>> = "Scalar[]";
template <>
constexpr const char* schema_type<at::ScalarType> = "ScalarType";
template <>
constexpr const char* schema_type<std::optional<at::ScalarType>> = "ScalarType?";
template <>
constexpr const char* schema_type<std::optional<at::Layout>> = "Layout?";
template <>
constexpr const char* schema_type<std::optional<at::Device>> = "Device?";
template <>
constexpr const char* schema_type<std::optional<at::MemoryFormat>> = "MemoryFormat?";
template <>
constexpr const char* schema_type<std::optional<at::Generator>> = "Generator?";
template <>
constexpr const char* schema_type<std::string_view> = "str";
template <>
constexpr const char* schema_type<std::optional<std::string_view>> = "str?";

template <class Return>
constexpr std::array<const char*, 1> results_of{schema_type<std::remove_reference_t<Return>>};
template <>
constexpr std::array<const char*, 0> results_of<void>{};
template <class... Types>
constexpr std::array<const char*, sizeof...(Types)> results_of<std::tuple<Types...>>{
    schema_type<std::remove_reference_t<Types>>...};

// A C++ signature, and how to make its function.
struct Candidate {
  c10::ArrayRef<const char*> arguments;
  c10::ArrayRef<const char*> results;
  // Throws if the op has another signature.
  std::optional<TypedFunction> (*make)(const c10::OperatorHandle&, const NativeKernel&);
};

template <class Signature>
struct CandidateFor;
template <class Return, class... Args>
struct CandidateFor<Return(Args...)> {
  using Signature = Return(Args...);
  static constexpr std::array<const char*, sizeof...(Args)> arguments{schema_type<Args>...};
  static_assert(((schema_type<Args> != nullptr) && ...), "a type that `schema_type` does not know");

  static std::optional<TypedFunction> make(const c10::OperatorHandle& op,
                                           const NativeKernel& native) {
    // For a kernel that is only called boxed, the C++ signature is unknown.
    if (!has_unboxed<Signature>(native.function())) return std::nullopt;
    // Checks the native kernel's signature, which torch stored at its registration.
    op.typed<Signature>();
    return TypedFunction{reinterpret_cast<void*>(&call<Return, Args...>),
                         c10::fn_has_symint<Signature>::value,
                         c10::impl::CppSignature::make<Signature>()};
  }
  static Candidate candidate() { return {arguments, results_of<Return>, &make}; }
};

// Text that is equal for a schema and the C++ signatures that fit it, as far as the schema
// determines them.
class SignatureText {
 public:
  explicit SignatureText(const Candidate& candidate) {
    for (const char* type : candidate.arguments) argument(type);
    for (const char* type : candidate.results) result(type);
  }
  explicit SignatureText(const c10::FunctionSchema& schema) {
    const auto type_of = [](const c10::Argument& argument) {
      const std::string type = argument.real_type()->str();
      return type.rfind("SymInt", 0) == 0 ? "int" + type.substr(6) : type;
    };
    for (const auto& each : schema.arguments()) {
      const bool is_written_to = each.alias_info() != nullptr && each.alias_info()->isWrite();
      const std::string type = type_of(each);
      argument(is_written_to && type == "Tensor" ? "Tensor!" : type);
    }
    for (const auto& each : schema.returns()) result(type_of(each));
  }
  const std::string& text() const { return text_; }

 private:
  void argument(const std::string& type) { text_ += type + ", "; }
  void result(const std::string& type) { text_ += "-> " + type; }

  std::string text_;
};

using Candidates = std::unordered_multimap<std::string, Candidate>;

template <class... Listed>
Candidates candidates(Signatures<Listed...>) {
  Candidates made;
  for (const Candidate& each : {CandidateFor<Listed>::candidate()...}) {
    made.emplace(SignatureText(each).text(), each);
  }
  return made;
}

}  // namespace

std::optional<TypedFunction> typed_function(const c10::OperatorHandle& op,
                                            const NativeKernel& native) {
  static const Candidates known = candidates(ListedSignatures{});
  const auto [first, last] = known.equal_range(SignatureText(op.schema()).text());
  for (auto each = first; each != last; ++each) {
    try {
      if (auto made = each->second.make(op, native)) return made;
    } catch (const c10::Error&) {
    }
  }
  return std::nullopt;
}

}  // namespace opgraft
