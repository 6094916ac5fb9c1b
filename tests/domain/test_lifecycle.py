"""The table of legal moves makes sense as a whole."""

from __future__ import annotations

from jayrun.domain.lifecycle import EXECUTION_MOVES, TERMINAL, EndReason, EventKind, ExecutionState

RETRIED = {ExecutionState.FAILED, ExecutionState.CANCELLED}


def reachable(start: ExecutionState, without: set[ExecutionState]) -> set[ExecutionState]:
    seen, open_ = {start}, [start]
    while open_:
        state = open_.pop()
        if state not in without:
            new = EXECUTION_MOVES[state] - seen
            seen |= new
            open_ += new
    return seen


def test_every_state_has_its_moves_and_none_to_itself() -> None:
    assert set(EXECUTION_MOVES) == set(ExecutionState)
    assert all(state not in moves for state, moves in EXECUTION_MOVES.items())


def test_what_has_ended_stays_so_unless_a_person_retries_it() -> None:
    assert {state for state, moves in EXECUTION_MOVES.items() if not moves} == TERMINAL - RETRIED
    assert {state: EXECUTION_MOVES[state] for state in RETRIED} == {state: {ExecutionState.READY} for state in RETRIED}


def test_every_state_is_reachable_and_can_end_well_and_badly() -> None:
    assert reachable(ExecutionState.READY, set()) == set(ExecutionState)
    for state in set(ExecutionState) - TERMINAL:
        assert reachable(state, RETRIED) >= TERMINAL
        assert ExecutionState.CANCELLED in EXECUTION_MOVES[state]
        # What nobody has taken up cannot have failed.
        assert (ExecutionState.FAILED in EXECUTION_MOVES[state]) == (state is not ExecutionState.READY)


def test_who_waits_runs_again_only_through_a_grant() -> None:
    assert ExecutionState.RUNNING not in EXECUTION_MOVES[ExecutionState.WAITING]
    assert ExecutionState.SUCCEEDED not in EXECUTION_MOVES[ExecutionState.WAITING]
    assert {state for state, moves in EXECUTION_MOVES.items() if ExecutionState.SUCCEEDED in moves} == {
        ExecutionState.RUNNING
    }


def test_each_end_of_a_lease_is_an_event_of_the_same_name() -> None:
    assert {reason.value for reason in EndReason} <= {kind.value for kind in EventKind}
