# What a plan of the root module decides, without an account.

mock_provider "aws" {
  mock_data "aws_availability_zones" {
    defaults = { names = ["us-east-1b", "us-east-1a"] }
  }

  mock_data "aws_region" {
    defaults = { name = "us-east-1" }
  }

  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
}

variables {
  keys_dir     = "tests/keys"
  cpu_image_id = "ami-0aaaaaaaaaaaaaaaa"
  gpu_image_id = "ami-0bbbbbbbbbbbbbbbb"
}

run "defaults" {
  command = plan

  assert {
    condition     = output.tensorboard_url == "http://localhost:6006"
    error_message = "by default nobody reaches TensorBoard from outside"
  }

  assert {
    condition     = local.zones == tolist(["us-east-1a"])
    error_message = "one zone by default: traffic between zones costs money"
  }

  assert {
    condition     = output.actor_machines == 3
    error_message = "12 actors, 4 per machine, are 3 machines"
  }

  assert {
    condition     = local.overrides["actor.total_slots"] == "360"
    error_message = "the exploration ladder should span all slots of the run"
  }

  assert {
    condition     = abs(output.hourly_cost_usd.total - (0.978 + 0.252 + 3 * 0.192 * 0.4 + 0.089 * 0.4 + (100 + 40 + 16 * 4) * 0.08 / 730 + 0.05 + 0.003)) < 0.005
    error_message = "the estimate is not the sum of its parts"
  }
}

run "machines_are_rounded_up" {
  command = plan

  variables {
    actors             = 13
    actors_per_machine = 4
    slots_per_actor    = 2
  }

  assert {
    condition     = output.actor_machines == 4 && local.overrides["actor.total_slots"] == "26"
    error_message = "13 actors need a fourth machine"
  }
}

# The two large columns of the table in docs/aws.md.
run "price_of_192_actors" {
  command = plan

  variables {
    actors          = 192
    slots_per_actor = 2
  }

  assert {
    condition     = abs(output.hourly_cost_usd.total - 5.1) < 0.05
    error_message = "docs/aws.md says 5.1"
  }
}

run "price_of_360_actors" {
  command = plan

  variables {
    actors          = 360
    slots_per_actor = 1
    replay_shards   = 2
  }

  assert {
    condition     = abs(output.hourly_cost_usd.total - 8.7) < 0.05
    error_message = "docs/aws.md says 8.7"
  }
}

run "the_end_stops_every_machine" {
  command = plan

  variables {
    replay_shards = 2
  }

  assert {
    condition = tolist(local.groups) == tolist([
      output.groups.actor, output.groups.evaluator, output.groups.replay[0], output.groups.replay[1], output.groups.learner
    ])
    error_message = "all groups should end, and the learner's, which ends them, last"
  }
}

run "the_learner_is_let_go_after_its_last_copy" {
  command = plan

  assert {
    condition     = module.learner.hook.group == output.groups.learner
    error_message = "the hook is that of the learner's group"
  }
}

run "unknown_price_is_null" {
  command = plan

  variables {
    learner_instance_type = "p9.unheard"
  }

  assert {
    condition     = output.hourly_cost_usd.total == null && output.hourly_cost_usd.parts.learner == null
    error_message = "an unknown price should give no total"
  }
}

run "known_price_counts" {
  command = plan

  variables {
    learner_instance_type = "p9.unheard"
    hourly_prices_usd     = { "p9.unheard" = 20 }
  }

  assert {
    condition     = output.hourly_cost_usd.parts.learner == 20
    error_message = "hourly_prices_usd should be used"
  }
}

run "stopped" {
  command = plan

  variables {
    running = false
  }

  assert {
    condition     = output.hourly_cost_usd.parts.learner == 0 && output.hourly_cost_usd.parts.actor == 0
    error_message = "a run that is stopped pays for no machine"
  }
}

run "own_overrides_win" {
  command = plan

  variables {
    overrides = { "env.id" = "atari:seaquest", "actor.slots" = "5" }
  }

  assert {
    condition     = local.overrides["env.id"] == "atari:seaquest" && local.overrides["actor.slots"] == "5"
    error_message = "the user's overrides come last"
  }
}

run "no_image" {
  command         = plan
  expect_failures = [aws_ssm_parameter.config]

  variables {
    cpu_image_id = ""
  }
}

run "wrong_run_name" {
  command         = plan
  expect_failures = [var.run]

  variables {
    run = "Pong!"
  }
}

run "world_is_not_admitted" {
  command         = plan
  expect_failures = [var.tensorboard_cidrs]

  variables {
    tensorboard_cidrs = ["0.0.0.0/0"]
  }
}

run "no_keys" {
  command         = plan
  expect_failures = [var.keys_dir]

  variables {
    keys_dir = "tests/nowhere"
  }
}

run "wrong_image" {
  command         = plan
  expect_failures = [var.cpu_image_id]

  variables {
    cpu_image_id = "debian"
  }
}

run "half_an_actor" {
  command         = plan
  expect_failures = [var.actors]

  variables {
    actors = 1.5
  }
}

run "disk_smaller_than_the_image" {
  command         = plan
  expect_failures = [var.learner_disk_gb, var.actor_disk_gb]

  variables {
    learner_disk_gb = 50
    actor_disk_gb   = 8
  }
}

run "ipv6_block" {
  command         = plan
  expect_failures = [var.tensorboard_cidrs]

  variables {
    tensorboard_cidrs = ["2001:db8::/32"]
  }
}

run "a_run_file_takes_the_place_of_the_preset" {
  command = plan

  variables {
    run_file = "tests/my.toml"
  }

  assert {
    condition     = strcontains(base64decode(local.run_file), "cartpole-apex")
    error_message = "machines should get the file itself"
  }
}

run "a_run_file_that_is_not_there" {
  command         = plan
  expect_failures = [var.run_file]

  variables {
    run_file = "tests/nowhere.toml"
  }
}

run "every_group_ends_at_the_time_that_is_set" {
  command = plan

  variables {
    stop_at       = "2099-01-31T18:00:00Z"
    replay_shards = 2
  }

  assert {
    condition = toset(keys(aws_autoscaling_schedule.stop)) == toset(local.groups) && alltrue([
      for each in aws_autoscaling_schedule.stop : each.desired_capacity == 0 && each.start_time == "2099-01-31T18:00:00Z"
    ])
    error_message = "AWS should end the machines of all groups"
  }
}

run "no_time_no_end" {
  command = plan

  assert {
    condition     = length(aws_autoscaling_schedule.stop) == 0
    error_message = "without stop_at nothing ends the machines"
  }
}

run "a_time_elsewhere" {
  command         = plan
  expect_failures = [var.stop_at]

  variables {
    stop_at = "2099-01-31T18:00:00+01:00"
  }
}

run "one_learner_is_alone" {
  command = plan

  assert {
    condition     = length(module.learner_peers) == 0 && !contains(keys(output.groups), "learner-peer") && !contains(keys(output.hourly_cost_usd.parts), "learner-peer")
    error_message = "by default nobody shares the learner's batches"
  }

  assert {
    condition     = !contains(keys(local.overrides), "net.learner_network") && !contains(keys(local.overrides), "learner.processes")
    error_message = "one learner talks to no other"
  }
}

run "several_learners_share_batches" {
  command = plan

  variables {
    learners = 3
  }

  assert {
    condition     = local.overrides["learner.processes"] == "3" && local.overrides["net.learner_network"] == "10.20.0.0/16"
    error_message = "the learner should expect the others, in the VPC"
  }

  assert {
    condition     = index(local.groups, output.groups["learner-peer"]) == index(local.groups, output.groups.learner) - 1 && index(local.groups, output.groups.learner) == length(local.groups) - 1
    error_message = "all groups should end, and the learner's, which ends them, last"
  }

  assert {
    condition     = strcontains(output.user_data["learner-peer"], "TROUPE_ROLE=learner-peer\n")
    error_message = "machines should know what they are"
  }

  assert {
    condition     = local.machines["learner-peer"].image_id == "ami-0bbbbbbbbbbbbbbbb" && local.machines["learner-peer"].root_device == "/dev/sda1"
    error_message = "every learner has a GPU"
  }

  # Two more g6.2xlarge at 0.4 of their price, and two disks of 100 GB.
  assert {
    condition     = abs(output.hourly_cost_usd.parts["learner-peer"] - 2 * 0.9776 * 0.4) < 0.001 && abs(output.hourly_cost_usd.parts.disks - (3 * 100 + 40 + 16 * 4) * 0.08 / 730) < 0.001
    error_message = "the estimate should count all learners"
  }
}

run "learners_on_demand_cost_their_price" {
  command = plan

  variables {
    learners          = 2
    learner_peer_spot = false
  }

  assert {
    condition     = output.hourly_cost_usd.parts["learner-peer"] == output.hourly_cost_usd.parts.learner
    error_message = "two of a kind cost the same"
  }
}

run "learners_need_private_addresses" {
  command         = plan
  expect_failures = [var.learners]

  variables {
    learners = 2
    vpc_cidr = "203.0.0.0/16"
  }
}

run "half_a_learner" {
  command         = plan
  expect_failures = [var.learners]

  variables {
    learners = 1.5
  }
}
