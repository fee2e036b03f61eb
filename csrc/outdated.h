// Routers whose ops were destroyed: Note [Ops that are destroyed].
#pragma once

namespace opgraft {

// Has outdated routers taken off the dispatcher by the main thread, soon. Called under the
// dispatcher's lock, with or without the GIL.
void schedule_withdrawal() noexcept;

// Removes the overrides of outdated routers, and tells the user. Needs no GIL.
void withdraw_overrides();

}  // namespace opgraft
