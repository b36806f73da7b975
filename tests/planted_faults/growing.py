"""Faults of isolation, of the optimiser's memory, of storage and of resuming."""

from planted_faults import Fault

FAULTS = [
    Fault(
        phrase="every policy has a standing order",
        place="episodes.py::decide",
        old="getattr(policy, 'keeps_measured', False)",
        new="True",
        test="test_deciding.py::test_fossilize_cull_and_wait_have_three_outcomes",
    ),
    Fault(
        phrase="a rule keeps what was planted by hand",
        place="episodes.py::decide",
        old="decided = set(by_hand)",
        new="decided = set()",
        test="test_deciding.py::test_no_rule_keeps_what_was_planted_by_hand",
    ),
    Fault(
        phrase="the slot of a fossil opens without an epoch of training",
        place="leyline/lifecycle.py::_find_end",
        old="epochs >= 1",
        new="epochs >= 0",
        test="test_deciding.py::test_a_rule_keeps_what_was_measured_in_the_same_decision",
    ),
    Fault(
        phrase="an unmeasured seed may be fossilized",
        place="leyline/legality.py::refuse",
        old="report.stage is SeedStage.PROBATIONARY and report.is_measured",
        new="report.stage is SeedStage.PROBATIONARY",
        test="kasmina/test_model.py::test_a_refusal_leaves_the_model_as_before",
    ),
    Fault(
        phrase="incubation passes by its sign alone",
        place="leyline/gates.py::shadow_gate",
        old="gain.mean > gain.standard_error",
        new="gain.mean > 0",
        test="leyline/test_gates.py::test_incubation_passes_by_more_than_one_standard_error",
    ),
    Fault(
        phrase="a blend that repeats another is explored",
        place="leyline/legality.py::legal_plantings",
        old="is_affordable and blend not in repeated",
        new="is_affordable",
        test="tamiyo/test_masks.py::test_a_blend_that_repeats_another_is_masked_and_keeps_its_number",
    ),
    Fault(
        phrase="a budget of FLOPs is not kept",
        place="leyline/legality.py::_fits_flops",
        old="flops.used + flops.costs[seed] <= flops.budget",
        new="flops.used <= flops.budget",
        test="garden/test_short.py::test_a_rule_under_a_budget_of_flops_never_grows_beyond_it",
    ),
    Fault(
        phrase="a control keeps a trained weight",
        place="kasmina/fresh.py::draw_again",
        old="name in silent and torch.equal(value, trained[name])",
        new="name in silent and not torch.equal(value, trained[name])",
        test="garden/test_controls.py::test_weights_that_cannot_be_drawn_again_are_asked_for",
    ),
    Fault(
        phrase="attention in a harvest does not mind a mask",
        place="kasmina/plain.py::graft_fossils",
        old="any((hasattr(part, 'grown_unseen') for part in fossil.modules()))",
        new="False",
        test="kasmina/test_unseen.py::test_a_call_in_which_attention_would_be_wrong_is_one_clear_line",
    ),
    Fault(
        phrase="a seed looks at the future",
        place="kasmina/seeds.py::CausalAttention.attend",
        old="nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)",
        new="nn.functional.scaled_dot_product_attention(query, key, value, is_causal=False)",
        test="kasmina/test_blueprints.py::test_a_sequence_seed_does_not_look_at_the_future",
    ),
    Fault(
        phrase="a TRAINING seed steers the host's gradients",
        place="kasmina/slot.py::SeedSlot.forward",
        old=("if not self.is_in_output:\n    return features"),
        new=(
            "if not self.is_in_output:\n"
            "    return features + (self.seed(features) - self.seed(features).detach())"
        ),
        test="kasmina/test_isolation.py::test_host_gradients_are_bit_identical_to_a_run_without_the_seed",
    ),
    Fault(
        phrase="a shadow pass trains the host",
        place="kasmina/switches.py::shadow",
        old="parameter.requires_grad_(False)",
        new="parameter.requires_grad_(True)",
        test="kasmina/test_isolation.py::test_host_gradients_are_bit_identical_to_a_run_without_the_seed",
    ),
    Fault(
        phrase="a shadow pass moves the batch norm buffers",
        place="kasmina/probing.py::buffers_kept",
        old="buffer.copy_(value)",
        new="buffer",
        test="kasmina/test_isolation.py::test_shadow_passes_leave_the_batch_norm_buffers_alone",
    ),
    Fault(
        phrase="a shadow pass draws from the global generator",
        place="kasmina/switches.py::shadow",
        old=(
            "with own_randomness(*random_seed, devices=sorted(devices)), ExitStack() as stack:\n"
            "    ..."
        ),
        new=("with ExitStack() as stack:\n    ..."),
        test="kasmina/test_isolation.py::test_shadow_passes_leave_the_global_random_state_alone",
    ),
    Fault(
        phrase="a culled seed stays in the function",
        place="kasmina/model.py::MorphogeneticModel._settle",
        old="slot.petrify() if is_kept else slot.uproot()",
        new="slot.petrify()",
        test="kasmina/test_lifecycle_in_model.py::test_after_a_cull_the_function_is_the_current_hosts_to_the_bit",
    ),
    Fault(
        phrase="germinating clears the optimiser's memory",
        place="kasmina/optimiser.py::OptimizerLink.adopt",
        old="group['params'].append(parameter)",
        new=("group['params'].append(parameter)\nlink.optimizer.state.clear()"),
        test="kasmina/test_optimiser.py::test_germinating_keeps_the_state_of_all_others",
    ),
    Fault(
        phrase="a fossil starts without its history",
        place="kasmina/optimiser.py::OptimizerLink.commit",
        old="moving = groups[number]['params']",
        new=(
            "moving = groups[number]['params']\n"
            "[link.optimizer.state.pop(parameter, None) for parameter in moving]"
        ),
        test="kasmina/test_optimiser.py::test_fossilizing_keeps_the_state_of_all_and_of_the_fossil",
    ),
    Fault(
        phrase="an altered tensor file is loaded",
        place="storage/store.py::Store._read",
        old="hashlib.sha256(contents[role]).hexdigest() != file['sha256']",
        new="not contents[role]",
        test="kasmina/test_saving_refusals.py::test_an_altered_tensor_is_refused",
    ),
    Fault(
        phrase="the old tensors go before the new manifest is there",
        place="storage/store.py::Store._write_manifest",
        old=(
            "if len(content) > disk.MOST_BYTES:\n"
            "    raise SaveError(f'the {self.kind} has {len(content):,} bytes of facts, more than the {disk.MOST_BYTES:,} that can be read back. Save less.')"
        ),
        new=(
            "if len(content) > disk.MOST_BYTES:\n"
            "    raise SaveError(f'the {self.kind} has {len(content):,} bytes of facts, more than the {disk.MOST_BYTES:,} that can be read back. Save less.')\n"
            "new = kept[-1].names\n"
            "own = [name for name in disk.names_in(self.folder) if self._owns(name) and name not in new]\n"
            "disk.remove([self.folder / name for name in own])"
        ),
        test="kasmina/test_saving_refusals.py::test_a_crash_while_saving_leaves_the_old_save[manifest]",
    ),
    Fault(
        phrase="a stored host's optimiser begins anew",
        place="runtime/storing.py::_restore",
        old="restore_optimizer(run.model, run.link, optimizer)",
        new="assert callable(restore_optimizer)",
        test="runtime/test_storing.py::test_a_host_read_back_after_every_epoch_has_the_same_episode[adamw]",
    ),
    Fault(
        phrase="a resumed policy has seen nothing yet",
        place="trials/running.py::EpochSaves.restore",
        old="decider.tracker.load(facts['trackers'][host])",
        new="assert facts['trackers']",
        test="trials/test_running.py::test_a_run_that_is_stopped_after_every_epoch_comes_to_the_same_end[checkpoint]",
    ),
    Fault(
        phrase="files that were altered are read",
        place="storage/store.py::Store._read",
        old="hashlib.sha256(contents[role]).hexdigest() != file['sha256']",
        new="False",
        test="trials/test_saves.py::test_a_damaged_newest_epoch_is_named_and_the_one_before_is_used[host-1-stream-bit]",
    ),
    Fault(
        phrase="a restored host sees other examples",
        place="runtime/host.py::HostRun.restore",
        old="self.plan.stream.load(snapshot.stream)",
        new="assert snapshot.stream",
        test="runtime/test_snapshots.py::test_restoring_brings_tensors_states_and_the_stream_back",
    ),
    Fault(
        phrase="events of an undone round stay",
        place="simic/checkpoints.py::History._rewind",
        old="self.sink.rewind(known.get(self.team.rank, runfolder.BEGINNING))",
        new="assert known is not None",
        test="simic/test_checkpoints.py::test_the_events_are_cut_to_where_the_checkpoint_was_taken",
    ),
    Fault(
        phrase="41: a resumed learner has no momentum",
        place="simic/ppo/agent.py::PPOAgent.restore",
        old="{'state': state}",
        new="{'state': {}}",
        test="simic/test_checkpoints.py::test_a_learner_comes_back_to_the_bit_with_the_callers_facts",
    ),
    Fault(
        phrase="41: resumed rows are dealt from the beginning",
        place="simic/ppo/agent.py::PPOAgent.restore",
        old="self.shuffles.set_state(content.tensors['shuffles'])",
        new="assert 'shuffles' in content.tensors",
        test="simic/test_checkpoints.py::test_a_learner_comes_back_to_the_bit_with_the_callers_facts",
    ),
    Fault(
        phrase="files are written in place",
        place="storage/files.py::_replace",
        old="temporary = beside if isinstance(content, bytes) else beside / path.name",
        new=(
            "temporary = path if isinstance(content, bytes) else beside / path.name\n"
            "path.unlink(missing_ok=True)"
        ),
        test="storage/test_files.py::test_a_failure_in_the_middle_leaves_the_old_file_and_one_line",
    ),
    Fault(
        phrase="a checkpoint is whole if it is there",
        place="storage/store.py::Store._read",
        old="hashlib.sha256(contents[role]).hexdigest() != file['sha256']",
        new="not file['sha256']",
        test="simic/test_checkpoints.py::test_one_flipped_bit_is_damage",
    ),
    Fault(
        phrase="rewinding fills up with zeros",
        place="storage/runfolder.py::cut_events",
        old="segment.number == end.segment and path.stat().st_size > end.size",
        new="segment.number == end.segment",
        test="telemetry/test_sink.py::test_rewinding_never_makes_a_file_longer",
    ),
    Fault(
        phrase="a data file may run anything",
        place="runtime/tasks/data.py::_ArraysOnly.find_class",
        old="(module, name) not in _PICKLE_ALLOWED",
        new="module == 'none'",
        test="runtime/tasks/test_data.py::test_a_file_that_wants_to_run_something_is_refused_and_runs_nothing",
    ),
    Fault(
        phrase="a file is listed before it is durable",
        place="storage/files.py::_replace",
        old="os.fsync(written.fileno())",
        new=("if path.name == 'manifest.json':\n    os.fsync(written.fileno())"),
        test="storage/test_crash_states.py::test_every_legal_folder_of_three_saves_of_three_files_is_whole",
    ),
    Fault(
        phrase="a manifest is in place before it is durable",
        place="storage/files.py::_replace",
        old="os.fsync(written.fileno())",
        new=("if path.name != 'manifest.json':\n    os.fsync(written.fileno())"),
        test="storage/test_crash_states.py::test_every_legal_folder_of_three_saves_of_three_files_is_whole",
    ),
    Fault(
        phrase="the folder is not durable before the manifest",
        place="storage/store.py::Store._write",
        old="digests = disk.write_files(self.folder, contents)",
        new=(
            "disk.make_folder(self.folder)\n"
            "digests = {name: disk._replace(self.folder / name, content) for name, content in contents.items()}"
        ),
        test="storage/test_crash_states.py::test_every_legal_folder_of_three_saves_of_three_files_is_whole",
    ),
    Fault(
        phrase="the manifest's own folder is not made durable",
        place="storage/files.py::write_durably",
        old="return _write_all(path.parent, {path.name: content})[path.name]",
        new=("make_folder(path.parent)\nreturn _replace(path, content)"),
        test="storage/test_crash_states.py::test_every_legal_folder_of_three_saves_of_three_files_is_whole",
    ),
    Fault(
        phrase="a new folder is not durable in the one above",
        place="storage/files.py::make_folder",
        old="sync_folder(path.parent)",
        new="continue",
        test="storage/test_crash_states.py::test_without_any_one_fsync_a_save_can_be_lost[folder above a new one]",
    ),
    Fault(
        phrase="two processes write to a folder at a time",
        place="storage/claims.py::_is_ours",
        old="fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="pass",
        test="storage/test_writers.py::test_a_second_writer_waits_for_the_first",
    ),
    Fault(
        phrase="a save that is replaced while it is read is damage",
        place="storage/store.py::Store.newest",
        old="not problems or manifest == self._read_manifest()",
        new="True",
        test="storage/test_writers.py::test_a_garden_that_is_read_while_it_is_saved_is_one_of_the_saves[2]",
    ),
    Fault(
        phrase="the list as seen may not be the one on disk",
        place="storage/store.py::Store._clear_up",
        old="disk.sync_folder(self.manifest.parent)",
        new="pass",
        test="storage/test_crash_states.py::test_without_any_one_fsync_a_save_can_be_lost[folder at the beginning]",
    ),
    Fault(
        phrase="the note of what is written may not be on disk",
        place="storage/store.py::Store._note",
        old="disk.sync_folder(self.manifest.parent)",
        new="pass",
        test="storage/test_crash_states.py::test_without_the_note_of_what_is_written_a_killed_save_leaves_files_for_good",
    ),
    Fault(
        phrase="old files go to make room for the new",
        place="storage/store.py::Store._write",
        old="disk.sweep(self.folder, self._owns)",
        new=(
            "disk.sweep(self.folder, self._owns)\n"
            "disk.remove([self.folder / name for name in disk.names_in(self.folder) if self._owns(name)])"
        ),
        test="storage/test_crash_states.py::test_every_legal_folder_of_three_saves_of_three_files_is_whole",
    ),
    Fault(
        phrase="a save writes over the files of the one before",
        place="storage/store.py::Store._free_name",
        old="name in taken",
        new="False",
        test="storage/test_crash_states.py::test_every_legal_folder_of_three_saves_of_three_files_is_whole",
    ),
    Fault(
        phrase="an altered manifest is believed",
        place="storage/store.py::Store._open",
        old="digest_json(body) != whole['sha256']",
        new="not digest_json(body)",
        test="kasmina/test_saving_refusals.py::test_an_altered_manifest_is_refused",
    ),
    Fault(
        phrase="settings changed by hand are believed",
        place="storage/runfolder.py::read_json",
        old="written != computed",
        new="not written",
        test="storage/test_runfolder.py::test_what_was_changed_by_hand_is_refused",
    ),
    Fault(
        phrase="a copy trains the host's tied weights as its own",
        place="kasmina/copies/copying.py::Copy.named_parameters",
        old="name.removeprefix(start) not in self.shared",
        new="True",
        test="kasmina/copies/test_copying.py::test_what_the_original_shares_stays_shared_and_is_not_the_copys_own",
    ),
]
