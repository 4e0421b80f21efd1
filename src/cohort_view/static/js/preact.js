// Preact, its hooks, and `html`, which are the page's way to make elements: text in a template is text on the page.

import { Component, Fragment, createContext, h, render } from "preact";
import { useCallback, useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";

const html = htm.bind(h);

export {
  Component,
  Fragment,
  createContext,
  html,
  render,
  useCallback,
  useContext,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
};
