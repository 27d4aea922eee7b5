# One security group per role. A role accepts only what the roles that talk to it send; nobody accepts SSH.

locals {
  roles = merge(
    {
      learner   = "Learner: rendezvous, parameters, TensorBoard"
      replay    = "Replay: inserts, samples, priorities"
      actor     = "Actor: nobody connects to it"
      evaluator = "Evaluator: nobody connects to it"
    },
    var.learner_peers ? { learner-peer = "Learner that shares batches: gradients" } : {},
  )
  peers = var.learner_peers ? ["learner-peer"] : []

  # Learners meet on ports that their systems choose: those of Linux.
  meetings = var.learner_peers ? [["learner", "learner-peer"], ["learner-peer", "learner"], ["learner-peer", "learner-peer"]] : []

  # who may connect to whom, and why
  flows = merge(
    { for role in concat(["replay", "actor", "evaluator"], local.peers) : "${role}-learner" => {
      from = role, to = "learner", first = 5550, last = 5552, why = "rendezvous, announcements, inference"
    } },
    { for role in concat(["learner", "actor"], local.peers) : "${role}-replay" => {
      from = role, to = "replay", first = 5560, last = 5560 + var.shards - 1, why = "items"
    } },
    { for pair in local.meetings : "${join("-", pair)}-gradients" => {
      from = pair[0], to = pair[1], first = 32768, last = 60999, why = "gradients"
    } },
  )
}

resource "aws_security_group" "this" {
  #checkov:skip=CKV2_AWS_5:the machines' launch templates use them
  for_each = local.roles

  name        = "${var.name}-${each.key}"
  description = each.value
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-${each.key}" })
}

resource "aws_vpc_security_group_ingress_rule" "flow" {
  for_each = local.flows

  security_group_id            = aws_security_group.this[each.value.to].id
  referenced_security_group_id = aws_security_group.this[each.value.from].id
  description                  = "${each.value.from} to ${each.value.to}: ${each.value.why}"
  ip_protocol                  = "tcp"
  from_port                    = each.value.first
  to_port                      = each.value.last
  tags                         = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "tensorboard" {
  for_each = toset(var.tensorboard_cidrs)

  security_group_id = aws_security_group.this["learner"].id
  cidr_ipv4         = each.value
  description       = "TensorBoard"
  ip_protocol       = "tcp"
  from_port         = 6006
  to_port           = 6006
  tags              = var.tags
}

# AWS's own services (parameters, logs, DNS, S3), all over HTTPS; their addresses are not known in advance.
resource "aws_vpc_security_group_egress_rule" "https" {
  for_each = local.roles

  security_group_id = aws_security_group.this[each.key].id
  cidr_ipv4         = "0.0.0.0/0"
  description       = "AWS services"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  tags              = var.tags
}

resource "aws_vpc_security_group_egress_rule" "flow" {
  for_each = local.flows

  security_group_id            = aws_security_group.this[each.value.from].id
  referenced_security_group_id = aws_security_group.this[each.value.to].id
  description                  = "${each.value.from} to ${each.value.to}: ${each.value.why}"
  ip_protocol                  = "tcp"
  from_port                    = each.value.first
  to_port                      = each.value.last
  tags                         = var.tags
}
