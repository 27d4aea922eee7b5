# Who may connect to whom.

mock_provider "aws" {}

run "only_roles_that_talk" {
  command = plan

  module {
    source = "./modules/security"
  }

  variables {
    name              = "troupe-test"
    vpc_id            = "vpc-0"
    shards            = 3
    learner_peers     = false
    tensorboard_cidrs = ["203.0.113.0/24"]
    tags              = {}
  }

  assert {
    condition     = toset(keys(aws_vpc_security_group_ingress_rule.flow)) == toset(["replay-learner", "actor-learner", "evaluator-learner", "learner-replay", "actor-replay"])
    error_message = "nobody connects to actors and evaluator, and the evaluator not to replay"
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.flow["actor-replay"].from_port == 5560 && aws_vpc_security_group_ingress_rule.flow["actor-replay"].to_port == 5562
    error_message = "three shards listen on 5560 to 5562"
  }

  assert {
    condition     = alltrue([for rule in aws_vpc_security_group_ingress_rule.tensorboard : rule.from_port == 6006 && rule.to_port == 6006])
    error_message = "the outside reaches TensorBoard and nothing else"
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.tensorboard) == 1
    error_message = "one rule per block"
  }
}

run "learners_meet_each_other_and_nobody_else" {
  command = plan

  module {
    source = "./modules/security"
  }

  variables {
    name              = "troupe-test"
    vpc_id            = "vpc-0"
    shards            = 1
    learner_peers     = true
    tensorboard_cidrs = ["203.0.113.0/24"]
    tags              = {}
  }

  assert {
    condition = toset([
      for name, rule in aws_vpc_security_group_ingress_rule.flow : name if rule.to_port > 5600
    ]) == toset(["learner-learner-peer-gradients", "learner-peer-learner-gradients", "learner-peer-learner-peer-gradients"])
    error_message = "learners, and nobody else, should reach the ports that learners choose"
  }

  assert {
    condition = alltrue([for name in ["learner-learner-peer-gradients", "learner-peer-learner-gradients", "learner-peer-learner-peer-gradients"] :
      aws_vpc_security_group_ingress_rule.flow[name].from_port == 32768 && aws_vpc_security_group_egress_rule.flow[name].to_port == 60999
    ])
    error_message = "Linux chooses ports from 32768 to 60999, and both ends have to let them through"
  }

  assert {
    condition     = alltrue([for to in ["learner", "replay"] : contains(keys(aws_vpc_security_group_ingress_rule.flow), "learner-peer-${to}")])
    error_message = "a learner that joins talks to the first one and to replay"
  }

  assert {
    condition     = length(aws_security_group.this) == 5 && length(aws_vpc_security_group_egress_rule.https) == 5
    error_message = "a learner that joins has a group of its own, which no TensorBoard is reached through"
  }
}
